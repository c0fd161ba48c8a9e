"""Tables, and row spaces, with a working set of rows in memory: like others, but rows are addressed by slots.

Contract
    Rows are brought into memory when they are looked up or stepped, and get the same bits as in a table in memory that
    replays skipped steps. Uses of all rows at once (a view, a dense gradient, a state dict) are refused.

Shape legend: V' x d this rank's part; S slots; K rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from embrace_fx.runtime.tables.joined_table import JoinedTable
from embrace_fx.runtime.tables.local_storage import LocalStorage, Rows
from embrace_fx.runtime.tables.own_step import hyperparameters, new_state
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.skipped_steps import form_of
from embrace_fx.runtime.tables.unit import Unit
from embrace_fx.runtime.tables.update_rule import DeferredUpdate, Options, SparseUpdate
from embrace_fx.runtime.tiers.record_file import TierError
from embrace_fx.runtime.tiers.records import WEIGHTS, Column
from embrace_fx.runtime.tiers.slot_history import SlotHistory
from embrace_fx.runtime.tiers.working_set import WorkingSet
from embrace_fx.vocabulary.exactness import STILL, Moving
from embrace_fx.vocabulary.row_space import RowSpace
from embrace_fx.vocabulary.row_wise import RowWiseAdagrad

REFUSAL = (
    "{asked} needs all rows of {name}, and memory holds only a working set (table_memory), which lookups read and the "
    "optimizer steps by rows. Call the model, save by save_checkpoint and load by load_checkpoint, or leave the table "
    "out of table_memory."
)


class FileStorage(LocalStorage):
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


class InSlots(Unit):
    """A table or a row space beyond memory: rows are read and stepped in slots.

    Attributes:
        memory: its working set.
    """

    memory: WorkingSet

    @property
    def local(self) -> Tensor:
        return self.memory.columns[WEIGHTS]

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        return self.memory.places(ids, to_write=to_write)

    def look_up(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As of any unit. Where a row cannot be read, others wait for this rank's rows all the same: it raises once.

        Raises:
            TierError: a row cannot be read.
        """
        failed_before = self.memory.failure
        self.memory.counts.asked += ids.numel()
        found = super().look_up(ids, dtype)
        if self.memory.failure and not failed_before:
            raise TierError(self.memory.failure)
        return found


class TieredTable(InSlots, RowTable):
    """A table beyond memory. What a `RowTable` takes, and:

    Args:
        memory: its working set.
        first: its first row in that.
        shown: columns of state that the optimizer has made.
    """

    history: SlotHistory

    def __init__(
        self, *args: Any, memory: WorkingSet, first: int = 0, shown: Collection[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.memory = memory
        self.shown: set[str] = self._with_made(shown)
        self.rows = range(first, first + self.shape[0])
        self._on_host: Any = WeakTensorKeyDictionary()  # ids of the device -> rows among which they are
        self._expected: Tensor | None = None
        self.history = SlotHistory(self, memory, self.rows)
        self.no_dense = REFUSAL.format(name=self.name, asked="a dense gradient, or state,")

    def numbers(self, ids: Tensor) -> Tensor:
        """The numbers of rows (K,) in the working set."""
        return ids + self.rows.start if self.rows.start else ids

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        return self.memory.places(self.numbers(ids), among=self._rows_on_host(ids), to_write=to_write)

    @property
    def needs_host(self) -> bool:  # type: ignore[override]
        return self.local.is_cuda

    def expect(self, rows: Tensor | None) -> None:
        """Tells among which rows of the host (K,) the ids of the next lookup are; None: that is not known."""
        self._expected = rows

    def note_rows(self, ids: Tensor, rows: Tensor) -> None:
        self._on_host[ids] = rows
        self.memory.read_ahead(self.numbers(rows), self.memory.step + 1)

    def note(self, ids: Tensor, among: Tensor) -> None:
        if ids.is_cuda:
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
        if self._expected is not None:
            self._on_host[ids], self._expected = self._expected, None
        return super().look_up(ids, dtype)

    @property
    def state(self) -> Mapping[str, Any]:
        """The counters, and the state columns of the working set."""
        return {**super().state, **{key: self.memory.columns[key] for key in sorted(self.shown)}}

    def _rule(self, way: Moving, options: Options) -> type[SparseUpdate]:
        if way in STILL:
            return SparseUpdate
        if way == "either":
            if form_of(self.holder, options, self.state, self.local.dtype) is not None:
                return DeferredUpdate
            if self.lacks_state:
                return _FirstDeferred
        raise RuntimeError(not_replayable(self.name, type(self.holder)))

    def keep_first(self, state: Mapping[str, Any], places: Tensor) -> None:
        for key, value in state.items():
            self.memory.columns[key].index_copy_(0, places, value)
        self.shown |= state.keys()

    @property
    def counters(self) -> dict[str, Any]:
        """The state's counters, which all rows share."""
        return dict(super().state)

    def _with_made(self, shown: Collection[str]) -> set[str]:
        """Adds the state column that exists before the first step, if the optimizer has one."""
        return {*shown, "sum"} if type(self.optimizer) is RowWiseAdagrad else {*shown}

    def saved(self) -> dict[str, Any]:
        """Returns all that a checkpoint holds besides rows; no update may be pending."""
        self.flush()
        first = self.memory.initial.tables[self.rows.start]
        of_rows = {"shown": sorted(self.shown), "histories": self.history.saved(), "seed": first.seed}
        return {**of_rows, "counters": self.counters, "padding": first.padding}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over what `saved` gave."""
        initial = self.memory.initial
        first = replace(initial.tables[self.rows.start], seed=saved["seed"], padding=saved["padding"])
        self.memory.initial = initial.having(self.rows.start, first)
        self.history.load(saved["histories"], self.holder)
        self.shown = self._with_made(saved["shown"])
        self._made = None
        self.holder.state[self.parameter] = dict(saved["counters"])

    def moved(self) -> Iterator[tuple[Tensor, Tensor]]:
        """As of a `WorkingSet`; rows are the table's."""
        for rows, records in self.memory.moved(self.rows):
            own = rows - self.rows.start
            yield own, self.memory.records.sign(records, own) if self.rows.start else records

    def begin_step(self) -> SparseUpdate:
        self.memory.counts.steps += not self.rows.start
        return super().begin_step()

    @property
    def remark(self) -> str:
        return "" if self.rows.start else self.memory.told

    def step_dense(self) -> NoReturn:
        raise RuntimeError(self.no_dense)

    def held_bytes(self) -> tuple[int, int, int]:
        held = self.held
        weights, _, others = self.predicted_bytes(1)
        return weights, 0 if held is None or held.is_late else held.values().nbytes, others

    def predicted_bytes(self, ranks: int) -> tuple[int, int, int]:
        weights, others = self.local.nbytes, self.memory.nbytes - self.local.nbytes
        return self._share(weights), 0, self._share(others)

    def _share(self, nbytes: int) -> int:
        """Its part of what a working set takes."""
        return nbytes * len(self.rows) // self.memory.num_rows


class JoinedTiers(InSlots, JoinedTable):
    """Tables beyond memory that travel together; ids are rows of the space.

    Args:
        members: in one working set, in the order of the space.
    """

    members: tuple[TieredTable, ...]

    def __init__(self, space: RowSpace, members: Sequence[TieredTable]) -> None:
        self.memory = members[0].memory
        super().__init__(space, members)

    def _make_history(self) -> SlotHistory:
        return SlotHistory(self, self.memory, range(self.memory.num_rows), [each.history for each in self.members])

    def is_one(self) -> bool:
        return super().is_one() and all(each.shown == self.members[0].shown for each in self.members)

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.members[0].state)

    def begin_step(self) -> SparseUpdate:
        self.memory.counts.steps += 1
        return super().begin_step()


class _FirstDeferred(SparseUpdate):
    """The step that makes state: rows without gradient take it when they are next in memory."""

    table: TieredTable
    moves_all = True

    def finish(self, parts: Sequence[Rows]) -> None:
        table, counters = self.table, self.table.counters
        super().finish(parts)
        slots = table.places(torch.cat([ids for ids, _ in parts]), to_write=True)
        table.history.took_first(slots, self.optimizer, self._of_some, counters)


def not_replayable(table: str, kind: type[Optimizer]) -> str:
    """Makes the error text for an optimizer that must update all rows of a table at each step."""
    return (
        f"table_memory: {kind.__name__}, under its options, moves every row of {table} in each step, and memory holds "
        "only a working set. Use SGD without dampening, Adam or AdamW (weight decay decoupled or none), Adagrad or "
        "RMSprop without weight decay, RowWiseAdagrad, or row_updates='lazy'; or leave the table out of table_memory."
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
