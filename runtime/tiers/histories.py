"""Steps that rows beyond memory have skipped: histories are kept, not settled, until each row is next in memory.

Contract
    Where a table in memory has all rows take what they have skipped, here the history is closed, and another begins: a
    row takes the rest of the closed ones when it is next brought into memory, in the order and over the steps in which
    it would have taken them there. So its bits are the same, and no pass over the file is ever needed.

Shape legend: S slots of the working set; K of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.kernels.decay import Moments
from embrace_fx.runtime.tables.own_step import is_of_rows, step_tensor
from embrace_fx.runtime.tables.resting import PartAndState, RestingRows, SupposedStep
from embrace_fx.runtime.tables.skipped_steps import MOST_STEPS, Decaying, Linear, skipping
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS
from embrace_fx.runtime.tiers.working_set import WorkingSet


class _Skipped(Protocol):
    """Steps in a row that a row can have skipped."""

    count: int

    def take(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None: ...


class _FirstStep:
    """The step that makes a table's state, for rows without gradient: taken as the optimizer takes it.

    Args:
        counters: what the state counts, as before the step.
    """

    count = 1

    def __init__(self, optimizer: Optimizer, options: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        self._optimizer, self._options, self._counters = optimizer, options, dict(counters)

    def take(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None:
        behind = ids[taken.index_select(0, ids) < 1]
        values = local.index_select(0, behind)
        after = step_tensor(self._optimizer, self._options, values, torch.zeros_like(values), dict(self._counters))
        local.index_copy_(0, behind, values)
        for key, column in state.items():
            if is_of_rows(after.get(key), behind.numel()):
                column.index_copy_(0, behind, after[key])


class Histories(RestingRows):
    """The resting rows of a table beyond memory, by slots."""

    def __init__(self, memory: WorkingSet) -> None:
        super().__init__()
        self._memory = memory
        self._closed: list[tuple[int, _Skipped]] = []  # with the number of steps before each
        self._before = 0  # steps of closed histories

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

    def suppose(self, step: SupposedStep) -> None:
        """Keeps nothing: rows may be in other slots by then."""

    def took(self, ids: Tensor) -> None:
        self._memory.columns[TAKEN].index_fill_(0, ids, self._steps + 1)

    def took_first(
        self, ids: Tensor, optimizer: Optimizer, options: Mapping[str, Any], counters: Mapping[str, Any]
    ) -> None:
        """All rows but those in slots `ids` are still to take the step that has made state."""
        self.close()
        self._add(_FirstStep(optimizer, options, counters))
        self._memory.columns[TAKEN].index_fill_(0, ids, self._before)

    def shorten(self, table: PartAndState) -> None:
        if self._skipped is not None and self._skipped.count == MOST_STEPS:
            self.close()

    def settle(self, local: Tensor, state: Mapping[str, Any]) -> None:
        self.close()

    def close(self) -> None:
        """Closes the history: rows take the rest of it before anything else."""
        skipped, self._skipped = self._skipped, None
        if skipped is not None and skipped.count:
            skipped.end()
            self._add(skipped)

    def saved(self) -> list[dict[str, Any]]:
        """The closed histories, for a checkpoint. None is open."""
        return [{"form": type(each).__name__, **_plain(vars(each))} for _, each in self._closed]

    def load(self, saved: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> None:
        """Takes over histories as `saved` gave them, in the place of these."""
        self._skipped, self._closed, self._before = None, [], 0
        for each in saved:
            form = _FORMS[each["form"]]
            made = object.__new__(form)
            vars(made).update({key: value for key, value in each.items() if key != "form"})
            if form is Decaying and made._moments is not None:
                moments, made._moments = made._moments, object.__new__(Moments)
                vars(made._moments).update(moments)
            if form is _FirstStep:
                made._optimizer = optimizer
            self._add(made)

    def _add(self, skipped: _Skipped) -> None:
        self._closed.append((self._before, skipped))
        self._before += skipped.count

    def catch_up_closed(self, slots: Tensor, state: Mapping[str, Any]) -> None:
        """Lets rows in slots (K,) take what a table in memory has settled."""
        self._catch_up(slots, state, self._before)

    def catch_up(self, local: Tensor, state: Mapping[str, Any], ids: Tensor) -> bool:
        self._catch_up(ids, state, self._steps)
        return self.rest

    def _catch_up(self, slots: Tensor, state: Mapping[str, Any], until: int) -> None:
        memory, taken = self._memory, self._memory.columns[TAKEN]
        steps = taken.index_select(0, slots)
        behind = steps < until
        if not bool(behind.any()):
            return
        slots, steps = slots[behind], steps[behind]
        local = memory.columns[WEIGHTS]
        columns = {key: column for key, column in memory.columns.items() if key not in (WEIGHTS, TAKEN)}
        for before, skipped in self._due(int(steps.min()), until):
            own = slots[steps < before + skipped.count]
            since = torch.empty(memory.slots, dtype=torch.int64, device=slots.device)
            since.index_copy_(0, own, (taken.index_select(0, own) - before).clamp_(min=0))
            skipped.take(local, {**state, **columns}, own, since)
        taken.index_fill_(0, slots, until)
        memory.wrote(slots)

    def _due(self, first: int, until: int) -> list[tuple[int, _Skipped]]:
        """The histories that end after step `first`, with the number of steps before each."""
        closed = [each for each in self._closed if each[0] + each[1].count > first]
        return closed + ([(self._before, self._skipped)] if self._skipped is not None and until > self._before else [])


_FORMS: Mapping[str, type[Any]] = {form.__name__: form for form in (Decaying, Linear, _FirstStep)}


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in fields.items() if not isinstance(value, Optimizer | torch.device)}
    return {key: vars(value) if isinstance(value, Moments) else value for key, value in found.items()}
