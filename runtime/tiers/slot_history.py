"""Deferred optimizer steps of tables larger than memory: a row applies them when it is next in memory.

Contract
    When a table in memory would apply the deferred steps of all rows, only rows in slots do. The history is then
    closed, and a new one begins. Other rows apply the closed histories when they arrive in memory, in the same order
    and groups of steps as a table in memory. The bits are therefore equal, and no pass over the file is needed. On a
    device, rows apply steps without telling the host which were behind.
    The tables of a working set number their steps alike: a history begins after the steps of all closed ones.

Shape legend: S slots of the working set; K some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.kernels.decay import Moments
from embrace_fx.runtime.tables.history import DeferredAdam, History, SkippedSteps
from embrace_fx.runtime.tables.row_store import RowStore
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS

if TYPE_CHECKING:
    from embrace_fx.runtime.tiers.working_set import WorkingSet


class ClosedHistory(NamedTuple):
    """Consecutive optimizer steps that some rows have deferred, and apply when they are next read.

    Attributes:
        before: the number of the table's optimizer steps before these.
        rows: the rows of the table to which the steps belong.
    """

    before: int
    steps: SkippedSteps
    rows: range


class ClosedHistories:
    """All closed histories of a table larger than memory. Rows apply them when they are next read into memory."""

    def __init__(self, memory: WorkingSet) -> None:
        self._memory = memory
        self._closed: list[ClosedHistory] = []

    @property
    def steps(self) -> int:
        """The number of steps up to the end of the last history."""
        return max([each.before + each.steps.count for each in self._closed], default=0)

    def add(self, closed: ClosedHistory) -> None:
        """Adds a history. Rows in memory apply its steps now. Other rows apply them when they are read."""
        self._closed.append(closed)
        self.apply_on_arrival(self._memory.in_use(closed.rows), closed.before)

    def apply_on_arrival(self, slots: Tensor, taken: int) -> None:
        """Applies the histories to rows that have arrived in slots (K,), and have applied at least `taken` steps."""
        due = [each for each in self._closed if each.before + each.steps.count > taken]
        if due and slots.numel():
            self._memory.mark_written(slots)
            for some in slots.split(self._memory.part):
                for before, steps, rows in due:
                    self.apply_steps(self._memory.to_index(self.with_rows(some, rows)), before, steps)

    def with_rows(self, slots: Tensor, rows: range) -> Tensor:
        """Selects, from memory slots (K,), those whose row is in the range `rows`."""
        if len(rows) == self._memory.num_rows:
            return slots
        held = self._memory.row_of.index_select(0, slots)
        return slots[(held >= rows.start) & (held < rows.stop)]

    def apply_steps(self, slots: Tensor, before: int, steps: SkippedSteps) -> None:
        """Applies deferred steps, after `before` others, to the rows in slots (K,) that have not applied them."""
        columns, until = dict(self._memory.columns), before + steps.count
        weights, of_rows = columns.pop(WEIGHTS), columns.pop(TAKEN)
        taken = of_rows.index_select(0, slots)
        if not taken.is_cuda:  # a selection by mask synchronizes with a device, but costs nothing on the CPU
            behind = taken < until
            slots, taken = slots[behind], taken[behind]
        if slots.numel():
            since = torch.empty(len(of_rows), dtype=torch.int64, device=slots.device)
            since.index_copy_(0, slots, (taken - before).clamp_(min=0))
            steps.apply_to(weights, columns, slots, since)
            of_rows.index_copy_(0, slots, taken.clamp_(min=until))

    def to_checkpoint(self, rows: range) -> dict[str, Any]:
        """Returns the deferred optimizer steps of one table's rows as a checkpoint stores them."""
        found = []
        for before, steps, of in self._closed:
            if max(of.start, rows.start) < min(of.stop, rows.stop):
                found.append({"form": type(steps).__name__, "before": before, "fields": _to_cpu(vars(steps))})
        return {"closed": found}

    def load(self, rows: range, saved: Mapping[str, Any]) -> None:
        """Replaces the deferred optimizer steps of one table's rows by `saved`, the result of `to_checkpoint`."""
        left = [each._replace(rows=other) for each in self._closed for other in _other_rows(each.rows, rows)]
        self._closed = [*left, *read_histories(saved, rows, self._memory.columns[TAKEN].device)]


def read_histories(saved: Mapping[str, Any], rows: range, device: torch.device) -> list[ClosedHistory]:
    """Reads the deferred steps of a table's rows from `saved`, the result of `ClosedHistories.to_checkpoint`. Raises
    `ValueError` if another version of embrace_fx saved them.
    """
    found = []
    for each in saved["closed"]:
        if (form := _FORMS.get(each["form"])) is None:
            raise ValueError(
                f"the deferred optimizer steps were saved by another version of embrace_fx ({each['form']}). Load the "
                "checkpoint with that version"
            )
        made = object.__new__(form)
        vars(made).update({key: _to_device(device, value) for key, value in each["fields"].items()})
        if form is DeferredAdam and made._moments is not None:
            moments, made._moments = made._moments, None
            if device.type == "cpu":
                made._moments = object.__new__(Moments)
                vars(made._moments).update(moments)
        found.append(ClosedHistory(each["before"], made, rows))
    return found


def align_parts(parts: Sequence[dict[str, Tensor]], histories: Sequence[ClosedHistory]) -> None:
    """Applies deferred steps to the saved values of rows, so that all ranks' columns of a row have applied the same
    steps: ranks may keep different rows in memory, and only those have applied all closed histories.

    Args:
        parts: for each rank, name -> values (K, ...) of the same rows. Changed in place.
    """
    latest = torch.stack([part[TAKEN] for part in parts]).amax(0)
    for part in parts:
        if torch.equal(part[TAKEN], latest):
            continue
        part.update({key: value.contiguous() for key, value in part.items()})
        columns = {key: value for key, value in part.items() if key not in (WEIGHTS, TAKEN)}
        for before, steps, _ in histories:
            until = before + steps.count
            places = ((part[TAKEN] < until) & (until <= latest)).nonzero().view(-1)
            if places.numel():
                since = (part[TAKEN] - before).clamp_(min=0).to(torch.int64)
                steps.apply_to(part[WEIGHTS], columns, places, since)
                part[TAKEN].index_fill_(0, places, until)


class SlotHistory(History):
    """The optimizer steps that rows of a table larger than memory have deferred.

    Args:
        rows: the table's rows in the working set `memory`.
        members: for a joined table, the histories of its tables.
    """

    rows: range
    _taken: Tensor

    def __init__(self, store: RowStore, memory: WorkingSet, rows: range, members: Sequence[SlotHistory] = ()) -> None:
        super().__init__(store, {each.rows.start: each for each in members})
        self.rows, self._closed, self._tables, self._taken = rows, memory.closed, members, memory.columns[TAKEN]
        for each in members:
            each._first = 0  # slots are numbered for the joined table, not per table

    def begin(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        """Begins an optimizer step. If there is no open history, begins one after all closed histories."""
        known = self.open
        super().begin(optimizer, options)
        if self.open is not known:
            self._before = self._closed.steps

    def _close(self) -> None:
        """Closes the open history. Rows apply it when they are next read."""
        if self.open is not None and self.open.count:
            self.open.end()
            self._closed.add(ClosedHistory(self._before, self.open, self.rows))

    def _split_by_member(self, places: Tensor) -> Iterator[tuple[SlotHistory, Tensor]]:
        for each in self._tables:
            yield each, self._closed.with_rows(places, each.rows)

    def apply_open(self, places: Tensor, local: Tensor, state: Mapping[str, Any]) -> None:
        assert self.open is not None
        if self.open.count:
            self._closed.apply_steps(places, self._before, self.open)


NO_HISTORIES: Mapping[str, Any] = {"closed": []}
"""The result of `ClosedHistories.to_checkpoint` before any step."""
_FORMS: Mapping[str, type[Any]] = {form.__name__: form for form in SkippedSteps.__subclasses__()}


def _other_rows(rows: range, excluded: range) -> list[range]:
    """Returns the ranges of `rows` that are not in `excluded`."""
    parts = range(rows.start, min(rows.stop, excluded.start)), range(max(rows.start, excluded.stop), rows.stop)
    return [part for part in parts if part]


def _to_cpu(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an object's attributes that a checkpoint can store, with tensors on the CPU."""
    found = {key: value for key, value in fields.items() if not isinstance(value, torch.device)}
    return {
        key: vars(value) if isinstance(value, Moments) else _to_device("cpu", value) for key, value in found.items()
    }


def _to_device(device: torch.device | str, value: Any) -> Any:
    """Returns a tensor moved to a device, or any other value unchanged."""
    return value.to(device) if isinstance(value, Tensor) else value
