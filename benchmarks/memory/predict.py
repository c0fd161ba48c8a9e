"""What the memory model says at paper size, on the meta device: nothing is computed, so nothing is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from benchmarks.memory.cells import BUDGETS, MULTIPLES, Workload
from embrace_fx.capture import capture
from embrace_fx.capture.meta_models import on_fake_cpu
from embrace_fx.cost.links import Compute
from embrace_fx.passes.dropout import EagerDropout
from embrace_fx.passes.memory.budget import Memory
from embrace_fx.passes.memory.copy_placement import NO_COPIES, CopyRate
from embrace_fx.passes.partition import Partition
from embrace_fx.passes.pipeline import run_passes, with_tables
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.scheduler.step_graph import build_single_process
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.vocabulary.copy_ops import OFFLOAD
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import op_name

DEVICE = Compute(3.1e14 * 0.5 / 1e3, 1.5e12 / 1e3)
"""About an A100 (NVIDIA's data sheet): half of 312 TFLOP/s of matrix products, 1.5 TB/s of memory."""

HOST_LINK = CopyRate(2.4e7, 0.02)
"""About PCIe 4 x 16: 24 GB/s, 20 us to start a copy."""


def graph_of(workload: Workload) -> TrainingGraph:
    """Returns the joint graph of a step, captured on the meta device."""
    with torch.device("meta"):
        model = workload.make()
    with on_fake_cpu(model, workload.batch(0, 0, 0)) as (twin, batch):
        captured = capture(twin, batch, {}, train=True)
    return run_passes(with_tables(captured.graph), (EagerDropout(),)).graph


def under(graph: TrainingGraph, budget: float, compute: Compute, copies: CopyRate = NO_COPIES) -> dict[str, Any]:
    """Predicts the memory and the time of a step within a budget. Returns an error if the budget cannot be met."""
    try:
        lean = Memory(budget, compute, copies)(graph)
    except ValueError as error:
        return {"error": str(error)}
    found = step_memory(lean)
    return {
        "peak_bytes": found.peak_bytes,
        "time": step_ms(lean, compute) / step_ms(graph, compute),
        "run_again": sum("again" in node.meta for node in found.nodes),
        "offloaded": sum(op_name(node) == OFFLOAD for node in found.nodes),
    }


def step_ms(graph: TrainingGraph, compute: Compute) -> float:
    """Predicts the step time of a single process, whose nodes run one after another, concurrently with copies."""
    phases = run_passes(graph, (Partition(),)).graph
    return schedule(build_single_process(phases, compute), "none").diagnostics().step_ms


def predicted(
    workload: Workload, device_bytes: int, add: Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]
) -> None:
    """Predicts a model's steps for several budgets, then the batches that fit into a device's memory. Passes each
    prediction to `add`, by name.
    """
    graph = lru_cache(2)(lambda examples: graph_of(replace(workload, batch_size=examples)))
    own = workload.batch_size

    def largest() -> dict[str, Any]:
        """Returns the largest batch, extrapolated linearly from two batches."""
        few, many = (step_memory(graph(examples)).peak_bytes for examples in (own // 4, own))
        of_each = (many - few) / (own - own // 4)
        return {"peak_bytes": many, "examples": int(own + (device_bytes - many) / of_each)}

    eager = add("everything", largest)["examples"]
    for how, copies in (("again", NO_COPIES), ("offloading", HOST_LINK)):
        for budget in BUDGETS:
            add(f"{how} | {budget}", partial(_under, graph, own, budget, copies))
    for times in MULTIPLES:
        for how, copies in (("again", NO_COPIES), ("offloading", HOST_LINK)):
            found = add(
                f"{how} | {times} x {eager} examples", partial(_under, graph, times * eager, device_bytes, copies)
            )
        if "error" in found:
            break


def _under(graph: Callable[[int], TrainingGraph], examples: int, budget: float, copies: CopyRate) -> dict[str, Any]:
    return under(graph(examples), budget, DEVICE, copies)
