"""A sharded table with a working set of rows in memory; like a `RowTable`, but rows are addressed by slots.

Contract
    Rows are brought into memory when they are looked up or stepped, and get the same bits as in a table in memory that
    replays skipped steps. Uses of all rows at once (a view, a dense gradient, a state dict) are refused.

Shape legend: V' x d this rank's part; S slots; K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from embrace_fx.runtime.kernels import lookup_as
from embrace_fx.runtime.tables.held import Held
from embrace_fx.runtime.tables.held_gradient import Rows
from embrace_fx.runtime.tables.own_step import hyperparameters, new_state, rows_of_state, step_tensor
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.skipped_steps import form_of
from embrace_fx.runtime.tables.update_rule import Options, Replay, RowsAlone
from embrace_fx.runtime.tiers.histories import Histories
from embrace_fx.runtime.tiers.record_file import TierError
from embrace_fx.runtime.tiers.records import WEIGHTS, Column
from embrace_fx.runtime.tiers.working_set import WorkingSet
from embrace_fx.vocabulary.exactness import STILL, Moving
from embrace_fx.vocabulary.row_wise import RowWiseAdagrad

REFUSAL = (
    "expected {name}, of which memory holds a working set (table_memory), to be read by lookups and stepped by rows, "
    "found {asked} of all its rows. Call the model, save by save_checkpoint and load by load_checkpoint, or leave it "
    "out of table_memory."
)


class HeldInFile(Held):
    """Replaces a part of which only some rows are in memory; it can be read and written by ids only.

    Args:
        like: a tensor of its size, without memory.
    """

    def __init__(self, like: Tensor, refusal: str) -> None:
        super().__init__(like)
        self._refusal = refusal

    is_elsewhere = True

    def dense(self) -> NoReturn:
        raise RuntimeError(self._refusal)

    def memory(self) -> NoReturn:
        raise RuntimeError(self._refusal)

    def replace(self, local: Tensor) -> NoReturn:
        raise RuntimeError(self._refusal)

    def by_ids(self) -> Tensor:
        return self.now()


class TieredTable(RowTable):
    """A table beyond memory. It takes the arguments of `RowTable`, and:

    Args:
        memory: its working set.
        shown: columns of state that the optimizer has made.
    """

    def __init__(self, *args: Any, memory: WorkingSet, shown: Collection[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.memory, self.shown = memory, self._with_made(shown)
        self._on_host: Any = WeakTensorKeyDictionary()  # ids of the device -> rows among which they are
        self._expected: Tensor | None = None
        self._resting: Histories = Histories(memory)
        self.no_dense = REFUSAL.format(name=self.name, asked="a dense gradient, or state,")

    @property
    def local(self) -> Tensor:
        """The rows in memory, (S, d)."""
        return self.memory.columns[WEIGHTS]

    @property
    def like(self) -> Tensor:
        return self.parameter.held.now()  # type: ignore[attr-defined, no-any-return]  # a part

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        return self.memory.places(ids, among=self._rows_on_host(ids), to_write=to_write)

    @property
    def needs_host(self) -> bool:  # type: ignore[override]
        return self.local.is_cuda

    def expect(self, rows: Tensor | None) -> None:
        """Tells among which rows of the host (K,) the ids of the next lookup are; None: that is not known."""
        self._expected = rows

    def tell(self, ids: Tensor, rows: Tensor) -> None:
        self._on_host[ids] = rows
        self.read_ahead(rows, self.memory.step + 1)

    def note(self, ids: Tensor, among: Tensor) -> None:
        if ids.is_cuda and not self.failure:
            self._on_host[ids] = self._rows_on_host(among)

    def _rows_on_host(self, ids: Tensor) -> Tensor | None:
        """The rows among which ids of the device are, as far as the host has been told; else it waits for the ids."""
        if not ids.is_cuda:
            return None
        rows: Tensor | None = self._on_host.get(ids)
        if rows is None:
            rows = self._on_host[ids] = ids.cpu().unique()
        return rows

    def look_up(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self.failure:  # this rank reports it by the next step; other ranks still wait for rows
            return self.local.new_zeros((ids.numel(), self.local.shape[1]), dtype=dtype)
        self.memory.counts.asked += ids.numel()
        if self._expected is not None:
            self._on_host[ids], self._expected = self._expected, None
        try:
            slots = self.places(ids, to_write=self._resting.rest)
        except TierError as error:
            self.failure = str(error)
            raise
        self._resting.catch_up(self.local, self.state, slots)
        return lookup_as(self.local, slots, dtype or self.local.dtype)

    def read_ahead(self, ids: Tensor, due: int) -> None:
        """Begins to read rows (K,) that step number `due` will look up."""
        self._guarded(self.memory.read_ahead)(ids, due)

    def as_they_are(self, ids: Tensor) -> Tensor:
        none = self.local.new_zeros((ids.numel(), self.local.shape[1]))
        return none if (found := self._guarded(super().as_they_are)(ids)) is None else found

    def preview(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Options | None]:
        return self._guarded(super().preview)(ids, rows) or (rows, None)

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a call, which records a file's failure and then returns None: no caller could report the error."""

        def guarded(*args: Any) -> Any:
            if self.failure:
                return None
            try:
                return call(*args)
            except TierError as error:
                self.failure = str(error)
                return None

        return guarded

    def catch_up(self, ids: Tensor) -> bool:
        return self._resting.catch_up(self.local, self.state, self.places(ids, to_write=self._resting.rest))

    @property
    def state(self) -> Mapping[str, Any]:
        """The counters, and the state columns of the working set."""
        return {**super().state, **{key: self.memory.columns[key] for key in sorted(self.shown)}}

    def _rule(self, way: Moving, options: Options) -> type[RowsAlone]:
        if way in STILL:
            return FirstAlone if self.lacks_state else RowsAlone
        if way == "either":
            if form_of(self.holder, options, self.state, self.local.dtype) is not None:
                return Replay
            if self.lacks_state:
                return FirstOfAll
        raise RuntimeError(not_replayable(self.name, type(self.holder)))

    def keep_first(self, state: Mapping[str, Any], slots: Tensor) -> None:
        """Stores the state that the first step has made for rows in slots (K,)."""
        for key, value in state.items():
            if key in self.memory.columns:
                self.memory.columns[key].index_copy_(0, slots, value)
                self.shown.add(key)
            else:
                self.keep({key: value})

    @property
    def counters(self) -> dict[str, Any]:
        """The state's counters, which all rows share."""
        return {key: value for key, value in self.state.items() if key not in self.memory.columns}

    def _with_made(self, shown: Collection[str]) -> set[str]:
        """Columns with the one that is there before a step."""
        return {*shown, "sum"} if type(self.optimizer) is RowWiseAdagrad else {*shown}

    def saved(self) -> dict[str, Any]:
        """Returns all that a checkpoint holds besides rows; no update may be pending."""
        self.settle()
        of_rows = {"shown": sorted(self.shown), "histories": self._resting.saved(), "seed": self.memory.initial.seed}
        return {**of_rows, "counters": self.counters, "padding": self.memory.initial.padding}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores the result of `saved`."""
        self.failure = ""
        self.memory.initial = replace(self.memory.initial, seed=saved["seed"], padding=saved["padding"])
        self._resting.load(saved["histories"], self.holder)
        self.shown = self._with_made(saved["shown"])
        self.holder.state[self.parameter] = dict(saved["counters"])

    def took_first(self, slots: Tensor, options: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Records that the rows in slots (K,) have taken the first step, and no other row has."""
        self._resting.took_first(slots, self.holder, options, counters)

    def begin_step(self) -> RowsAlone:
        self.memory.counts.steps += 1
        rule = super().begin_step()
        for name in ("apply", "finish"):
            setattr(rule, name, self._guarded(getattr(rule, name)))
        return rule

    @property
    def told(self) -> str:
        return self.memory.told

    def step_dense(self) -> NoReturn:
        raise RuntimeError(self.no_dense)

    def held_bytes(self) -> tuple[int, int, int]:
        held, weights = self.held, self.local.nbytes
        gradient = 0 if held is None or held.is_late else held.values().nbytes
        return weights, gradient, self.memory.nbytes - weights

    def predicted_bytes(self, ranks: int) -> tuple[int, int, int | None]:
        return self.local.nbytes, 0, self.memory.nbytes - self.local.nbytes


class FirstAlone(RowsAlone):
    """The step that makes state, for a table beyond memory whose rows without gradient stay unchanged."""

    table: TieredTable

    def finish(self, parts: Sequence[Rows]) -> None:
        table = self.table
        none = (torch.empty(0, dtype=torch.int64, device=table.local.device), table.local[:0])
        ids, rows = (torch.cat(each) for each in zip(none, *parts, strict=True))
        slots, state = table.places(ids, to_write=True), table.state
        counters = table.counters
        values = table.local.index_select(0, slots)
        before = rows_of_state(state, slots, table.memory.slots)
        after = step_tensor(self.optimizer, self._of_some, values, rows, before)
        table.local.index_copy_(0, slots, values)
        if self.moves_all:
            table.took_first(slots, self._of_some, counters)
        table.keep_first(after, slots)


class FirstOfAll(FirstAlone):
    """The step that makes state, where rows without gradient are updated too: when they are next in memory."""

    moves_all = True


def not_replayable(table: str, kind: type[Optimizer]) -> str:
    """Makes the error text for an optimizer that must update all rows of a table at each step."""
    return (
        f"expected an optimizer whose skipped steps a row can take at once, for {table}, of which memory holds a "
        f"working set (table_memory), found {kind.__name__} under options by which each step moves every row. Use SGD "
        "without dampening, Adam or AdamW (weight decay decoupled or none), Adagrad or RMSprop without weight decay, "
        "RowWiseAdagrad, or row_updates='lazy'; or leave the table out of table_memory."
    )


def state_columns(
    optimizer: Optimizer, group: Mapping[str, Any], like: Tensor, state: Mapping[str, Any]
) -> dict[str, Column]:
    """Finds the columns of a table's optimizer state; `like` (0, d) are weights of it.

    Args:
        state: the state that the optimizer has made already, for the whole table.
    """
    if type(optimizer) is RowWiseAdagrad:
        return {"sum": Column((), like.dtype, group["initial_accumulator_value"])}
    known = {key: _none_of(value, like) for key, value in state.items()}
    options = hyperparameters(group)
    made = known or new_state(optimizer, options, like)
    return {
        key: Column(tuple(like.shape[1:]), value.dtype, _fill(optimizer, state.get(key)))
        for key, value in made.items()
        if isinstance(value, Tensor) and value.shape == like.shape
    }


def _none_of(value: Any, like: Tensor) -> Any:
    return like.new_empty((0, like.shape[1]), dtype=value.dtype) if isinstance(value, Tensor) and value.dim() else value


def _fill(optimizer: Optimizer, value: Tensor | None) -> float:
    """Returns the first value of a state column, which all rows share."""
    if value is None:
        return 0.0
    if value.device.type == "meta":
        return float(optimizer.defaults["initial_accumulator_value"])
    return float(value.reshape(-1)[0]) if value.numel() else 0.0
