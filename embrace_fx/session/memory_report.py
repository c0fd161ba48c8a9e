"""Reports the memory that training takes on a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from embrace_fx.passes.step_memory import StepMemory
from embrace_fx.runtime.tables.member import Member


def memory_report(step_memory: StepMemory, model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Reports this rank's memory: parameters and state, the predicted bytes that a step holds, and a line over time."""
    again = sum("again" in node.meta for node in step_memory.nodes)
    state = [value for each in optimizers for value in pytree.tree_leaves(dict(each.state))]
    lines = [
        "memory of this rank (steps predicted, the rest measured)",
        f"  parameters and buffers  {_mib(_nbytes([*model.parameters(), *model.buffers()]))}",
        f"  optimizer state         {_mib(_nbytes(state))}",
        f"  saved for the backward  {_mib(step_memory.saved_bytes)} in {len(step_memory.saved)} storages"
        + (f"; {again} nodes run again" if again else ""),
        f"  most at a time          {_mib(step_memory.peak_bytes)} in forward and backward",
        f"  |{step_memory.as_line()}|  forward to backward",
    ]
    return "\n".join(lines)


def tables_report(tables: Mapping[str, Member], ranks: int, beyond: Mapping[str, str]) -> str:
    """Returns lines with the bytes of each sharded table: predicted for any rank, and measured on this one.

    Args:
        beyond: table beyond memory -> its prediction as text.
    """
    rows: list[tuple[str, ...]] = [("", "parameters", "gradient", "state", "parameters", "gradient", "state")]
    for name, table in tables.items():
        numbers = (*table.predicted_bytes(ranks), *table.held_bytes())
        rows.append((name, *("not known yet" if number is None else _mib(number) for number in numbers)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, table in tables.items():
        aligned += [line for line in (table.store.remark, beyond.get(name) and f"  {beyond[name]}") if line]
    return "\n".join(["tables of this rank: predicted, then measured", *(f"  {each}" for each in aligned)])


def _nbytes(values: Iterable[Any]) -> int:
    """Returns the bytes of the tensors among values."""
    return sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))


def _mib(nbytes: int) -> str:
    """Returns bytes as a text in MiB."""
    return f"{nbytes / 2**20:,.2f} MiB"
