"""Keeps the histories of steps that rows beyond memory have skipped, until each row is next in memory.

Contract
    Where a table in memory has all rows take what they have skipped, here rows in slots do, the history is closed, and
    another begins: all other rows take the rest of the closed ones once they have come into memory, in the order and
    over the steps in which they would have taken them there. So bits are the same, and no pass over the file is ever
    needed. On a device rows take steps without the host's knowing which of them are behind.

Shape legend: S slots of the working set; K of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.kernels.decay import Moments
from embrace_fx.runtime.tables.own_step import is_of_rows, put_rows, same_options, step_tensor
from embrace_fx.runtime.tables.resting import ROWS_AT_ONCE, PartAndState, RestingRows
from embrace_fx.runtime.tables.skipped_steps import MOST_STEPS, Decaying, Linear, skipping
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS
from embrace_fx.runtime.tiers.working_set import WorkingSet


class _Skipped(Protocol):
    """Consecutive steps that a row can have skipped."""

    count: int

    def take(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None: ...


class _FirstStep:
    """The first step, which makes a table's state, for rows without gradient; the optimizer itself takes it.

    Args:
        counters: the state's counters before the step.
    """

    count = 1

    def __init__(self, optimizer: Optimizer, options: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        self._optimizer, self._options, self._counters = optimizer, options, dict(counters)

    def take(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None:
        behind = taken.index_select(0, ids) < 1
        before = local.index_select(0, ids)
        values = before.clone()
        after = step_tensor(self._optimizer, self._options, values, torch.zeros_like(values), dict(self._counters))
        local.index_copy_(0, ids, torch.where(behind.unsqueeze(1), values, before))
        for key, column in state.items():
            made: Any = after.get(key)
            if is_of_rows(made, ids.numel()):
                shown = behind.view(-1, *[1] * (made.dim() - 1))
                column.index_copy_(0, ids, torch.where(shown, made, column.index_select(0, ids)))


class Histories(RestingRows):
    """The resting rows of a table beyond memory, by slots."""

    def __init__(self, memory: WorkingSet) -> None:
        super().__init__()
        self._memory = memory
        memory.arrived = self._arrived
        self._closed: list[tuple[int, _Skipped]] = []  # (number of steps before it, closed history)
        self._before = 0  # number of steps in closed histories

    @property
    def _steps(self) -> int:
        return self._before + (0 if self._skipped is None else self._skipped.count)

    def begin(self, optimizer: Any, options: Mapping[str, Any], table: PartAndState) -> None:
        local = table.local
        found = skipping(type(optimizer), options, local.dtype)
        assert found is not None
        form, _ = found
        if self._skipped is not None and not (isinstance(self._skipped, form) and self._skipped.fits(options)):
            self.close()
        if self._skipped is None:
            self._skipped = form(local.device)

    def note(self, options: Mapping[str, Any], table: Any) -> None:
        supposed = self._supposed
        super().note(options, table)
        if supposed is None or not same_options(supposed.options, options):
            return
        slots, taken = table.places(supposed.ids, to_write=True), self._memory.columns[TAKEN]
        if bool((taken.index_select(0, slots) == self._steps - 1).all()):  # none has had a gradient
            table.local.index_copy_(0, slots, supposed.rows)
            put_rows(self._memory.columns, supposed.state, slots, self._memory.slots)
            taken.index_fill_(0, slots, self._steps)

    def took(self, ids: Tensor) -> None:
        self._memory.columns[TAKEN].index_fill_(0, ids, self._steps + 1)

    def took_first(
        self, ids: Tensor, optimizer: Optimizer, options: Mapping[str, Any], counters: Mapping[str, Any]
    ) -> None:
        """Records that only the rows in slots `ids` have taken the step that has made state."""
        self.close()
        self._memory.columns[TAKEN].index_fill_(0, ids, self._before + 1)
        self._add(_FirstStep(optimizer, options, counters))

    def shorten(self, table: PartAndState) -> None:
        if self._skipped is not None and self._skipped.count == MOST_STEPS:
            self.close()

    def settle(self, local: Tensor, state: Mapping[str, Any]) -> None:
        self.close()

    def close(self) -> None:
        """Closes the history: rows in slots take the rest of it now, all others before anything else."""
        skipped, self._skipped, self._supposed = self._skipped, None, None
        if skipped is not None and skipped.count:
            skipped.end()
            self._add(skipped)

    def saved(self) -> list[dict[str, Any]]:
        """Returns the closed histories, for a checkpoint; no history may be open."""
        return [{"form": type(each).__name__, **_plain(vars(each))} for _, each in self._closed]

    def load(self, saved: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
        """Replaces the histories by those from `saved`."""
        self._skipped, self._supposed, self._closed, self._before = None, None, [], 0
        for each in saved:
            form = _FORMS[each["form"]]
            made = object.__new__(form)
            device = self._memory.columns[WEIGHTS].device
            vars(made).update({key: _on(device, value) for key, value in each.items() if key != "form"})
            if form is Decaying and made._moments is not None:
                moments, made._moments = made._moments, object.__new__(Moments)
                vars(made._moments).update(moments)
                made._moments = made._moments if device.type == "cpu" else None
            if form is _FirstStep:
                made._optimizer = optimizer
            self._add(made)

    def _add(self, skipped: _Skipped) -> None:
        before = self._before
        self._closed.append((before, skipped))
        self._before += skipped.count
        for slots in self._memory.in_use().split(ROWS_AT_ONCE):
            self._arrived(slots, before)

    def _arrived(self, slots: Tensor, taken: int) -> None:
        """Lets rows in slots (K,) take what a table in memory has settled; each has taken so many steps, or more."""
        due = [each for each in self._closed if each[0] + each[1].count > taken]
        if due and slots.numel():
            self._memory.wrote(slots)
            self._take(self._memory.to_index(slots), due)

    def catch_up(self, local: Tensor, state: Mapping[str, Any], ids: Tensor) -> bool:
        if self._skipped is not None and self.rest:
            self._take(ids, [(self._before, self._skipped)])
        return self.rest

    def _take(self, slots: Tensor, due: Sequence[tuple[int, _Skipped]]) -> None:
        """Lets rows in slots (K,) take what they have skipped of histories, which follow on each other."""
        memory, taken = self._memory, self._memory.columns[TAKEN]
        until = due[-1][0] + due[-1][1].count
        steps = taken.index_select(0, slots)
        if not steps.is_cuda:  # where it costs nothing to know which
            behind = steps < until
            slots, steps = slots[behind], steps[behind]
            due = [each for each in due if slots.numel() and each[0] + each[1].count > int(steps.min())]
        local = memory.columns[WEIGHTS]
        columns = {key: column for key, column in memory.columns.items() if key not in (WEIGHTS, TAKEN)}
        for before, skipped in due:
            own = slots if steps.is_cuda else slots[steps < before + skipped.count]
            since = torch.empty(memory.slots, dtype=torch.int64, device=slots.device)
            since.index_copy_(0, own, (taken.index_select(0, own) - before).clamp_(min=0))
            skipped.take(local, columns, own, since)
        taken.index_copy_(0, slots, steps.clamp(min=until))


_FORMS: Mapping[str, type[Any]] = {form.__name__: form for form in (Decaying, Linear, _FirstStep)}


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in fields.items() if not isinstance(value, Optimizer | torch.device)}
    return {key: vars(value) if isinstance(value, Moments) else _on("cpu", value) for key, value in found.items()}


def _on(device: torch.device | str, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
