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
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.kernels.decay import Moments
from embrace_fx.runtime.tables.own_step import is_of_rows, put_rows, same_options, step_tensor
from embrace_fx.runtime.tables.resting import PartAndState, RestingRows
from embrace_fx.runtime.tables.skipped_steps import MOST_STEPS, Decaying, SkippedSteps, skipping
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS
from embrace_fx.runtime.tiers.working_set import WorkingSet


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
    """The resting rows of a table beyond memory, by slots.

    Args:
        rows: of the table, in the working set.

    Attributes:
        together: of the row space that it is in.
    """

    def __init__(self, memory: WorkingSet, rows: range) -> None:
        super().__init__()
        self._memory, self._rows = memory, rows
        memory.arrived = self.arrived
        self._closed: list[tuple[int, SkippedSteps | _FirstStep]] = []  # with the number of steps before each
        self._before = 0  # steps until the open one
        self.together: TogetherHistories | None = None

    @property
    def _open(self) -> SkippedSteps | None:
        return self.skipped or (None if self.together is None else self.together.skipped)

    @property
    def rest(self) -> bool:
        return (found := self._open) is not None and found.count > 0

    @property
    def _steps(self) -> int:
        return self._before + (0 if (found := self._open) is None else found.count)

    def begin(self, optimizer: Any, options: Mapping[str, Any], table: PartAndState) -> None:
        local = table.local
        found = skipping(type(optimizer), options, local.dtype)
        assert found is not None
        form, _ = found
        known = self.skipped
        if known is None or not (isinstance(known, form) and known.fits(options)):
            self.close()
            self.skipped = form(local.device)

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
        if self.skipped is not None and self.skipped.count == MOST_STEPS:
            self.close()

    def settle(self, local: Tensor, state: Mapping[str, Any]) -> None:
        self.close()

    def close(self) -> None:
        """Closes the history: rows in slots take the rest of it now, all others before anything else."""
        if self.together is not None:
            self.together.close()
        skipped, self.skipped, self._supposed = self.skipped, None, None
        if skipped is not None and skipped.count:
            skipped.end()
            self._add(skipped)

    def saved(self) -> dict[str, Any]:
        """The closed histories, for a checkpoint. None is open."""
        closed = [{"form": type(of).__name__, "before": n, "fields": _plain(vars(of))} for n, of in self._closed]
        return {"steps": self._before, "closed": closed}

    def load(self, saved: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Takes over histories as `saved` gave them, in the place of these."""
        self.close()
        self._closed, self._before = [], saved["steps"]
        for each in saved["closed"]:
            form = _FORMS[each["form"]]
            made = object.__new__(form)
            device = self._memory.columns[WEIGHTS].device
            vars(made).update({key: _on(device, value) for key, value in each["fields"].items()})
            if form is Decaying and made._moments is not None:
                moments, made._moments = made._moments, object.__new__(Moments)
                vars(made._moments).update(moments)
                made._moments = made._moments if device.type == "cpu" else None
            if form is _FirstStep:
                made._optimizer = optimizer
            self._closed.append((each["before"], made))

    def _add(self, skipped: SkippedSteps | _FirstStep) -> None:
        before = self._before
        self._closed.append((before, skipped))
        self._before += skipped.count
        self.arrived(self._memory.in_use(self._rows), before)

    def arrived(self, slots: Tensor, taken: int) -> None:
        """Lets rows in slots (K,) take what a table in memory has settled; each has taken so many steps, or more."""
        due = [each for each in self._closed if each[0] + each[1].count > taken]
        if due and slots.numel():
            self._memory.wrote(slots)
            for some in slots.split(self._memory.part):
                self._take(self._memory.to_index(some), due)

    def catch_up(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, first: int = 0) -> bool:
        if (found := self._open) is not None and found.count:
            self._take(ids, [(self._before, found)])
        return self.rest

    def _take(self, slots: Tensor, due: Sequence[tuple[int, SkippedSteps | _FirstStep]]) -> None:
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


class TogetherHistories(Histories):
    """The resting rows of a space's tables: their open history counts on from one number for all of them.

    Args:
        tables: the first row of each in the working set, and its own histories.
    """

    def __init__(self, memory: WorkingSet, tables: Mapping[int, Histories]) -> None:
        super().__init__(memory, range(memory.num_rows))
        self._tables = tuple(tables.values())
        self._bounds = torch.tensor([*tables][1:], dtype=torch.int64, device="cpu")
        for each in self._tables:
            each.together = self

    @property
    def rest(self) -> bool:
        return any(each.rest for each in self._tables)

    def begin(self, optimizer: Any, options: Mapping[str, Any], table: PartAndState) -> None:
        if self.skipped is None:
            for each in self._tables:
                each.close()
            self._before = max(each._before for each in self._tables)
            for each in self._tables:
                each._before = self._before
        super().begin(optimizer, options, table)

    def close(self) -> None:
        skipped, self.skipped, self._supposed = self.skipped, None, None
        if skipped is not None and skipped.count:
            skipped.end()
            self._before += skipped.count
            for each in self._tables:
                each._add(skipped)

    def arrived(self, slots: Tensor, taken: int) -> None:
        for each, own in self._by_tables(slots):
            each.arrived(own, taken)

    def catch_up(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, first: int = 0) -> bool:
        if self.skipped is not None:
            return super().catch_up(local, state, ids)
        for each, own in self._by_tables(ids) if self.rest else ():
            each.catch_up(local, state, own)
        return self.rest

    def _by_tables(self, slots: Tensor) -> list[tuple[Histories, Tensor]]:
        of = torch.bucketize(self._memory.row_of.index_select(0, slots), self._bounds, right=True)
        return [(self._tables[k], slots[of == k]) for k in of.unique().tolist()]


NO_HISTORIES: Mapping[str, Any] = {"steps": 0, "closed": []}
"""As `Histories.saved` gives them before any step."""
_FORMS: Mapping[str, type[Any]] = {form.__name__: form for form in (*SkippedSteps.__subclasses__(), _FirstStep)}


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in fields.items() if not isinstance(value, Optimizer | torch.device)}
    return {key: vars(value) if isinstance(value, Moments) else _on("cpu", value) for key, value in found.items()}


def _on(device: torch.device | str, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
