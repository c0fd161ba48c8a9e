"""One count: a model under one system trains a step, and what the next one holds is counted.

Counted are the results of ops, from when they are made until nothing holds them (`CountedMemory`), in the same bytes as
predictions. The resident set is no measure of a budget: pages that one step has freed are often still resident when the
next one begins.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd  # noqa: TID251  (the knapsack has no other entrance)
from torch._functorch import config  # noqa: TID251  (nor another switch)
from torch._functorch.partitioners import min_cut_rematerialization_partition  # noqa: TID251
from torch.utils.checkpoint import checkpoint

import embrace_fx
from benchmarks.memory.cells import LARGER, MULTIPLES, WORKLOADS, Cell, Sized
from tests.support.counted_memory import CountedMemory

WARM_UP, TIMED = 2, 9


class Checkpointed(nn.Module):
    """A block under `torch.utils.checkpoint`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


class Training:
    """Trains a model under one system, always from the same initial parameters.

    Args:
        spill_to: the directory for offloaded values.
    """

    def __init__(self, workload: Sized, cell: Cell, spill_to: str) -> None:
        torch.manual_seed(0)
        self._model, self._batch = workload.make(), workload.batch(0, 0, 0)
        self._within: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._around: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._call = self._under(cell, spill_to)

    def step(self) -> dict[str, Tensor]:
        """Runs a step, and returns the gradients of the batch."""
        torch.manual_seed(1)
        with self._around:
            self._call(*self._batch).backward()
        named = self._model.named_parameters()
        found = {name.replace(".block", ""): p.grad for name, p in named if p.grad is not None}
        self._model.zero_grad(set_to_none=True)
        return found

    def counted_bytes(self) -> int:
        """Returns the maximum bytes that a step holds at a time."""
        counted = CountedMemory([*self._model.parameters(), *self._model.buffers(), *self._batch])
        if self._is_compiled_by_torch:
            self._within = counted  # entered inside of graphs, because Dynamo compiles nothing under an active mode
            self.step()
            self._within = contextlib.nullcontext()
        else:
            with counted:
                self.step()
        return counted.peak_bytes

    def timed_ms(self) -> float:
        """Runs a step, and returns its milliseconds."""
        began = time.perf_counter()
        self.step()
        return (time.perf_counter() - began) * 1e3

    def predicted(self) -> dict[str, Any]:
        """Returns what embrace_fx predicts for its step, or {} for other systems."""
        if not isinstance(self._call, embrace_fx.CompiledModel):
            return {}
        builder: Any = self._call._session.programs.pipeline
        held = builder.step_memory()
        return {
            "predicted_bytes": held.peak_bytes,
            "predicted_ms": self._call.schedule.diagnostics().step_ms,
            "limit_bytes": builder._shown_step.graph.memory_limit,
            "run_again": sum("again" in node.meta for node in held.nodes),
            "offloaded": len(self._call.schedule.steps.copies) // 2,
        }

    def _under(self, cell: Cell, spill_to: str) -> Callable[..., Tensor]:
        self._is_compiled_by_torch = cell.system == "knapsack"
        if cell.system == "everything":
            return self._model
        if cell.system == "checkpointing":
            blocks: Any = self._model.layers
            for k, block in enumerate(blocks):
                blocks[k] = Checkpointed(block)
            return self._model
        if self._is_compiled_by_torch:
            self._around = config.patch(activation_memory_budget=cell.budget)
            torch.compiler.reset()
            backend = aot_autograd(
                fw_compiler=self._lowered,
                bw_compiler=self._lowered,
                partition_fn=min_cut_rematerialization_partition,
            )
            return torch.compile(self._model, backend=backend, dynamic=False)
        to = spill_to if cell.system == "offloading" else None
        return embrace_fx.compile(self._model, memory_budget=cell.budget, spill_to=to)

    def _lowered(self, module: fx.GraphModule, _: Any) -> Callable[[list[Any]], Any]:
        """Runs a graph of torch's partitioner op by op, and frees each value after its last use."""

        def run(arguments: list[Any]) -> Any:
            with self._within:
                return fx.Interpreter(module).boxed_run(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def gradients(cell: Cell) -> dict[str, Tensor]:
    """Returns the gradients of a model's first step."""
    with tempfile.TemporaryDirectory() as spill_to:
        return Training(WORKLOADS[cell.model], cell, spill_to).step()


def count(cell: Cell, expected: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns the measurements of a cell.

    Args:
        expected: the gradients that the cell must compute, bit for bit.
    """
    with tempfile.TemporaryDirectory() as spill_to:
        training = Training(WORKLOADS[cell.model], cell, spill_to)
        found = training.step()
        same = found.keys() == expected.keys() and all(torch.equal(g, expected[name]) for name, g in found.items())
        return {"counted_bytes": training.counted_bytes(), "same_bits": same, **training.predicted()}


def larger_batches(model: str) -> dict[str, Any]:
    """Measures which larger batches fit into the bytes that eager mode takes. Stops at the first batch that does not
    fit.
    """
    workload = LARGER[model]
    with tempfile.TemporaryDirectory() as spill_to:
        eager = Training(workload, Cell(model, "everything"), spill_to)
        eager.step()
        found: dict[str, Any] = {"eager_bytes": eager.counted_bytes()}
        for system in ("embrace_fx", "offloading"):
            for times in MULTIPLES:
                larger = replace(workload, batch_size=times * workload.batch_size)
                training = Training(larger, Cell(model, system, found["eager_bytes"]), spill_to)
                try:
                    training.step()
                except (RuntimeError, ValueError) as error:
                    found[f"{system} x {times}"] = {"error": str(error)}
                    break
                found[f"{system} x {times}"] = {"counted_bytes": training.counted_bytes(), **training.predicted()}
    return found


def times(cells: Sequence[Cell]) -> dict[str, float]:
    """Returns the median milliseconds of a step for each cell. All cells have the same model.

    Their steps take turns, each time in another order, because a step depends on the caches and the heap that the
    previous step has left.
    """
    with tempfile.TemporaryDirectory() as spill_to:
        trainings = {cell.key: Training(WORKLOADS[cell.model], cell, spill_to) for cell in cells}
        for _ in range(WARM_UP):
            for training in trainings.values():
                training.step()
        order, ms = Random(0), []
        for _ in range(TIMED):
            turns = order.sample(sorted(trainings), len(trainings))
            ms.append({key: trainings[key].timed_ms() for key in turns})
    return {key: median(each[key] for each in ms) for key in trainings}
