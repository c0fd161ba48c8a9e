"""The history of a table beyond memory: the steps that a row defers until it is next in memory.

Contract
    When a table in memory would apply the deferred steps of all rows, only rows in slots do. The history is then
    closed, and a new one begins. Other rows apply the closed histories when they arrive in memory, in the same order
    and groups of steps as a table in memory. The bits are therefore equal, and no pass over the file is needed. On a
    device, rows apply steps without telling the host which were behind.

Shape legend: S slots of the working set; K some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.kernels.decay import Moments
from embrace_fx.runtime.tables.history import Decaying, History, SkippedSteps
from embrace_fx.runtime.tables.own_step import is_of_rows, step_tensor
from embrace_fx.runtime.tables.row_store import RowStore
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS
from embrace_fx.runtime.tiers.working_set import WorkingSet


class _FirstStep:
    """The first step, which creates state, for rows without a gradient. Calls the optimizer itself.

    Args:
        counters: the state's counters before the step.
    """

    count = 1

    def __init__(self, optimizer: Optimizer, options: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        self._optimizer, self._options, self._counters = optimizer, options, dict(counters)

    def take(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None:
        """Makes the first step, with a gradient of zero, for the rows `ids` that have not made it."""
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


class SlotHistory(History):
    """The history of a table or row space beyond memory.

    Args:
        rows: its rows in the working set.
        members: the histories of a row space's tables.
    """

    rows: range
    _taken: Tensor

    def __init__(self, store: RowStore, memory: WorkingSet, rows: range, members: Sequence[SlotHistory] = ()) -> None:
        super().__init__(store, {each.rows.start: each for each in members})
        self._memory, self.rows, self._tables, self._taken = memory, rows, tuple(members), memory.columns[TAKEN]
        for each in members:
            each._first = 0  # the tables share the row space's slots
        memory.arrived = self.arrived
        self._closed: list[tuple[int, SkippedSteps | _FirstStep]] = []  # (steps before it, history)

    def begin(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        """Begins a step; in a joined history, all tables first get a common count of steps."""
        if self.open is None and self._tables:  # give its tables a common number of steps
            self.close()
            self._before = max(each._before for each in self._tables)
            for each in self._tables:
                each._before = self._before
        super().begin(optimizer, options)

    def took_first(
        self, slots: Tensor, optimizer: Optimizer, options: Mapping[str, Any], counters: Mapping[str, Any]
    ) -> None:
        """Records that only the rows in slots (K,) have applied the step that created state."""
        self.close()
        self._taken.index_fill_(0, slots, self._before + 1)
        self._add(_FirstStep(optimizer, options, counters))

    def _close(self) -> None:
        """Adds the steps recorded since the last close, if any, to every table's history."""
        skipped = self.open
        if skipped is not None and skipped.count:
            skipped.end()
            self._before += skipped.count if self._tables else 0
            for each in self._tables or (self,):
                each._add(skipped)

    def _add(self, skipped: SkippedSteps | _FirstStep) -> None:
        """Closes a history: rows in slots apply it now, and other rows when they arrive."""
        before = self._before
        self._closed.append((before, skipped))
        self._before += skipped.count
        self.arrived(self._memory.in_use(self.rows), before)

    def arrived(self, slots: Tensor, taken: int) -> None:
        """Applies closed histories to rows in slots (K,), each of which has applied at least `taken` steps."""
        for each, own in self._split(slots) if self._tables else ():
            each.arrived(own, taken)
        due = [each for each in self._closed if each[0] + each[1].count > taken]
        if due and slots.numel():
            self._memory.wrote(slots)
            for some in slots.split(self._memory.part):
                self._take(self._memory.to_index(some), due)

    def _split(self, places: Tensor) -> Iterator[tuple[SlotHistory, Tensor]]:
        """Yields each table's history with the places that hold rows of it."""
        firsts = torch.tensor([each.rows.start for each in self._tables[1:]], device="cpu")
        of = torch.bucketize(self._memory.row_of.index_select(0, places), firsts, right=True)
        for k in of.unique().tolist():
            yield self._tables[k], places[of == k]

    def take(self, places: Tensor, local: Tensor, state: Mapping[str, Any]) -> None:
        """Applies the open history to rows in slots."""
        assert self.open is not None
        if self.open.count:
            self._take(places, [(self._before, self.open)])

    def _take(self, slots: Tensor, due: Sequence[tuple[int, SkippedSteps | _FirstStep]]) -> None:
        """Applies consecutive histories to the rows in slots (K,)."""
        memory, taken = self._memory, self._taken
        until = due[-1][0] + due[-1][1].count
        steps = taken.index_select(0, slots)
        if not steps.is_cuda:  # on the CPU, where the selection needs no synchronization
            behind = steps < until
            slots, steps = slots[behind], steps[behind]
            due = [each for each in due if slots.numel() and each[0] + each[1].count > int(steps.min())]
        columns = {key: column for key, column in memory.columns.items() if key not in (WEIGHTS, TAKEN)}
        for before, skipped in due:
            own = slots if steps.is_cuda else slots[steps < before + skipped.count]
            since = torch.empty(memory.slots, dtype=torch.int64, device=slots.device)
            since.index_copy_(0, own, (taken.index_select(0, own) - before).clamp_(min=0))
            skipped.take(memory.columns[WEIGHTS], columns, own, since)
        taken.index_copy_(0, slots, steps.clamp(min=until))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Returns the closed histories for a checkpoint. None may be open."""
        closed = [{"form": type(of).__name__, "before": n, "fields": _plain(vars(of))} for n, of in self._closed]
        return {"steps": self._before, "closed": closed}

    def load(self, saved: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Replaces the histories by those that `saved` returned."""
        self.close()
        self._closed, self._before = [], saved["steps"]
        device = self._taken.device
        for each in saved["closed"]:
            form = _FORMS[each["form"]]
            made = object.__new__(form)
            vars(made).update({key: _on(device, value) for key, value in each["fields"].items()})
            if form is Decaying and made._moments is not None:
                moments, made._moments = made._moments, None
                if device.type == "cpu":
                    made._moments = object.__new__(Moments)
                    vars(made._moments).update(moments)
            if form is _FirstStep:
                made._optimizer = optimizer
            self._closed.append((each["before"], made))


NO_HISTORIES: Mapping[str, Any] = {"steps": 0, "closed": []}
"""The result of `SlotHistory.saved` before any step."""
_FORMS: Mapping[str, type[Any]] = {form.__name__: form for form in (*SkippedSteps.__subclasses__(), _FirstStep)}


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that a checkpoint can hold, with tensors on the CPU."""
    found = {key: value for key, value in fields.items() if not isinstance(value, Optimizer | torch.device)}
    return {key: vars(value) if isinstance(value, Moments) else _on("cpu", value) for key, value in found.items()}


def _on(device: torch.device | str, value: Any) -> Any:
    """Returns a tensor on a device, or any other value itself."""
    return value.to(device) if isinstance(value, Tensor) else value
