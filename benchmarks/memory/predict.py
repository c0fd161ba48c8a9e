"""What the memory model says at paper size, on the meta device: nothing is computed, so nothing is measured."""

from __future__ import annotations

import torch

from benchmarks.memory.cells import Sized
from embrace_fx.capture import capture
from embrace_fx.cost.links import Compute
from embrace_fx.passes.dropout import EagerDropout
from embrace_fx.passes.memory.budget import Memory
from embrace_fx.passes.memory.held import held
from embrace_fx.passes.memory.place import CopyRate
from embrace_fx.passes.scheduler.node_cost import estimate
from embrace_fx.session.pipeline import analyse, run_passes
from embrace_fx.vocabulary.graph import TrainingGraph

DEVICE = Compute(3.1e14 * 0.5 / 1e3, 1.5e12 / 1e3)
"""About an A100 (NVIDIA's data sheet): half of 312 TFLOP/s of matrix products, 1.5 TB/s of memory."""

HOST_LINK = CopyRate(2.4e7, 0.02)
"""About PCIe 4 x 16: 24 GB/s, 20 us to start a copy."""


def graph_of(workload: Sized) -> TrainingGraph:
    """The joint graph of a step, captured on the meta device."""
    with torch.device("meta"):
        model = workload.make()
        batch = tuple(tensor.to("meta") for tensor in workload.batch(0, 0, 0))
    return run_passes(analyse(capture(model, batch, {}, train=True)), (EagerDropout(),)).graph


def under(graph: TrainingGraph, budget: float) -> dict[str, float]:
    """Bytes at the peak and time over no budget, predicted."""
    node_ms = estimate(DEVICE)
    plain_ms = sum(map(node_ms, held(graph).nodes))
    found = held(Memory(budget, DEVICE, HOST_LINK)(graph))
    again_ms = sum(map(node_ms, found.nodes)) - plain_ms
    return {"peak_bytes": found.peak_bytes, "everything_bytes": held(graph).peak_bytes, "again": again_ms / plain_ms}


def largest_batch(batch_size: int, held_bytes: float, most_bytes: int) -> int:
    """Examples that fit where a batch holds so much: what a step makes grows with its batch."""
    return int(batch_size * most_bytes / held_bytes)
