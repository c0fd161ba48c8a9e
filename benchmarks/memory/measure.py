"""One measurement: a model under one system trains some steps in a process of its own.

The peak is the resident set's: what a step adds to what is there before it, in new pages, as the kernel counts them
(`VmHWM`, reset before the step). It sees everything that an op takes, whoever takes it. `counted` is what
`CountedMemory` counts, op by op, in the same bytes as predictions; torch's compiled functions it does not see.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import embrace_fx
from benchmarks.memory.cells import WORKLOADS, Cell
from embrace_fx.runtime.memory.counted import CountedMemory

WARM_UP, MEASURED = 2, 4


class Checkpointed(nn.Module):
    """A block under `torch.utils.checkpoint`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def run(cell: Cell, directory: str | None = None) -> dict[str, Any]:
    """What a cell comes to: milliseconds of each step, and the most bytes that a step adds."""
    torch.manual_seed(0)
    workload = WORKLOADS[cell.model]
    model, batch = workload.make(), workload.batch(0, 0, 0)
    with tempfile.TemporaryDirectory(dir=directory) as offload_to:
        call = _call(cell, model, offload_to)

        def step() -> None:
            call(*batch).backward()
            model.zero_grad(set_to_none=True)

        began = time.perf_counter()
        for _ in range(WARM_UP):
            step()
        first_s = time.perf_counter() - began
        steps_ms = [_timed_ms(step) for _ in range(MEASURED)]
        found: dict[str, Any] = {"ms": steps_ms, "median_ms": median(steps_ms), "first_s": first_s}
        found["resident_bytes"] = min(_resident(step) for _ in range(2))
        if cell.system != "knapsack":
            found["counted_bytes"] = _counted(step, model, batch)
        if isinstance(call, embrace_fx.CompiledModel):
            held: Any = call._session.planned.builder.held()  # type: ignore[union-attr]
            found |= {
                "predicted_bytes": held.peak_bytes,
                "predicted_ms": call.schedule.diagnostics().step_ms,
                "run_again": sum("again" in node.meta for node in held.nodes),
                "offloaded": len(call.schedule.steps.copies) // 2,
            }
    return found


def _call(cell: Cell, model: nn.Module, offload_to: str) -> Callable[..., Tensor]:
    if cell.system == "checkpointing":
        blocks: Any = getattr(model, "layers", None)
        if blocks is None:
            raise ValueError(f"expected blocks to checkpoint, as `layers` of {cell.model}, found none")
        for k, block in enumerate(blocks):
            blocks[k] = Checkpointed(block)
    if cell.system == "knapsack":
        from torch._functorch import config  # noqa: PLC0415, TID251  (the knapsack has no other switch)

        config.activation_memory_budget = cell.budget if cell.budget is not None else 1.0
        return torch.compile(model, backend="aot_eager_decomp_partition")
    if cell.system == "embrace_fx":
        budget = cell.budget
        return embrace_fx.compile(model, memory_budget=budget, offload_to=offload_to if budget is not None else None)
    return model


def _timed_ms(step: Callable[[], None]) -> float:
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e3


def _resident(step: Callable[[], None]) -> int:
    """Bytes by which the resident set grows in a step, at most."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _counted(step: Callable[[], None], model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    with CountedMemory([*model.parameters(), *model.buffers(), *batch]) as counted:
        step()
    return int(counted.peak_bytes)
