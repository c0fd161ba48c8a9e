"""Tables larger than memory: their rows are read and updated in slots (places of one row each in memory).

Contract
    Rows are read into memory when they are looked up or updated. They get the same bits as in a table in memory with
    deferred steps. Uses of all rows at once (a view, a dense gradient, a state dict) raise.

Shape legend: V' x d this rank's part; S slots; K rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.own_step import State, first_state, has_row_values, hyperparameters
from embrace_fx.runtime.tables.row_store import JoinedState, RowStore
from embrace_fx.runtime.tables.state_dicts import read_state, write_state
from embrace_fx.runtime.tables.table import Member, Table
from embrace_fx.runtime.tiers.initial import InitialValuesOfTables
from embrace_fx.runtime.tiers.record_file import TierError
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS, Column
from embrace_fx.runtime.tiers.slot_history import SlotHistory
from embrace_fx.runtime.tiers.working_set import WorkingSet

REFUSAL = (
    "{asked} needs all rows of {name}, but table_memory keeps only some of them in memory. Use this table only in the "
    "model's lookups and in optimizer steps, and save and load it with save_checkpoint() and load_checkpoint(). Or "
    "leave the table out of table_memory."
)


class FileStorage(LocalStorage):
    """The storage of a shard that has only some of its rows in memory. Reads and writes of the whole shard raise
    `refusal`.

    Args:
        like: a placeholder with the shard's shape, dtype and device.
    """

    def __init__(self, like: Tensor, refusal: str) -> None:
        super().__init__(like)
        self._refusal = refusal

    is_elsewhere = True

    def _refuse(self, local: object = None) -> NoReturn:
        raise RuntimeError(self._refusal)

    dense = memory = replace = _refuse

    def by_ids(self) -> Tensor:
        """Returns the placeholder for the shard, without its values."""
        return self.stored()


class SlotRows(RowStore):
    """Stores the rows of one or more tables larger than memory in slots (places for one row each in memory).

    Args:
        member: the table, or the first one of several tables that share the memory.
        memory: the slots, and the storage for all other rows.
        first: the table's first row in the working set, in which the rows of all its tables are numbered.
        tables: the stores of the tables, if several share the memory.

    Attributes:
        rows: the range of this table's rows in the working set.
    """

    history: SlotHistory

    def __init__(
        self,
        member: Member,
        memory: WorkingSet,
        first: int = 0,
        tables: Sequence[SlotRows] = (),
        counters: JoinedState | None = None,
    ) -> None:
        self.member, self.memory, self._tables, self._joined = member, memory, tables, counters
        self.rows = range(memory.num_rows) if tables else range(first, first + member.shape[0])
        self._columns = {key: column for key, column in memory.columns.items() if key not in (WEIGHTS, TAKEN)}
        self.refusal = REFUSAL.format(name=member.layout.name, asked="A dense gradient or state")
        self._on_host: Any = WeakTensorKeyDictionary()  # ids on the device -> rows on the host that include them
        self._expected: Tensor | None = None
        self.history = SlotHistory(self, memory, self.rows, [each.history for each in tables])
        if not tables:
            assert member.optimizer is not None
            state = member.optimizer.state.get(member.parameter) or {}
            self._set_counters({key: value for key, value in state.items() if key not in self._columns})

    def _set_counters(self, counters: Mapping[str, Any]) -> None:
        """Sets the table's step counters. Missing ones get their initial values."""
        optimizer = self.member.optimizer
        assert optimizer is not None
        _, first = first_row_state(optimizer, self.member.param_group(), self.local[:0])
        optimizer.state[self.member.parameter] = {**first, **counters}

    def join(self, members: Sequence[Member], bounds: Sequence[int]) -> RowStore:
        tables = [each.store for each in members if isinstance(each.store, SlotRows)]
        return SlotRows(members[0], self.memory, tables=tables, counters=JoinedState(members, bounds))

    @property
    def local(self) -> Tensor:
        """The weights in all memory slots."""
        return self.memory.columns[WEIGHTS]

    def numbers(self, ids: Tensor) -> Tensor:
        """Converts ids (K,) of the table to row numbers of the working set."""
        return ids + self.rows.start if self.rows.start else ids

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        """Returns the memory slots of the rows `ids` (K,), after reading missing rows into memory."""
        return self.memory.places(self.numbers(ids), host_ids=self._rows_on_host(ids), to_write=to_write)

    def look_up(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        """Returns `places` for a lookup. Raises `TierError` if a row cannot be read: later calls read nothing, and all
        ranks raise at the next handshake.
        """
        if self._expected is not None:
            self._on_host[ids], self._expected = self._expected, None
        failed_before = self.memory.failure
        self.memory.counts.asked += ids.numel()
        found = self.places(ids, to_write=to_write)
        if self.memory.failure and not failed_before:
            raise TierError(self.memory.failure)
        return found

    # -- ids on a device -----------------------------------------------------------------------------------------------

    @property
    def needs_host(self) -> bool:  # type: ignore[override]
        return self.local.is_cuda

    def expect(self, rows: Tensor | None) -> None:
        """Records row ids on the host that include those of the next lookup, or None if they are not known."""
        self._expected = rows

    def record_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Records that `rows`, on the host, include all of `ids` (K,), on the device. Starts reading these rows."""
        self._on_host[ids] = rows
        self.memory.read_ahead(self.numbers(rows), self.memory.step + 1)

    def record(self, ids: Tensor, host_ids: Tensor) -> None:
        if ids.is_cuda:
            self._on_host[ids] = self._rows_on_host(host_ids)

    def _rows_on_host(self, ids: Tensor) -> Tensor | None:
        """Returns row ids on the host that include all of `ids` (K,) on a device, or None if `ids` are on the host."""
        if not ids.is_cuda:
            return None
        rows: Tensor | None = self._on_host.get(ids)
        if rows is None:
            rows = self._on_host[ids] = ids.cpu().unique()
        return rows

    # -- optimizer state -----------------------------------------------------------------------------------------------

    @property
    def counters(self) -> dict[str, Any]:
        """The step counters, which all rows share."""
        return read_state(self.member.optimizer_of_members, self.member.parameter)

    @property
    def state(self) -> Mapping[str, Any]:
        """The step counters, and the optimizer state in all memory slots."""
        return {**self.counters, **self._columns}

    @property
    def entries(self) -> Mapping[str, Any]:
        return self.state

    def has_uniform_state(self) -> bool:
        return self._joined is None or self._joined.has_uniform_state()

    def keep(self, state: Mapping[str, Any]) -> None:
        """Stores the step counters that a step has changed. The state in memory slots has been changed in place."""
        if self._joined is None:
            write_state(self.member.optimizer_of_members, self.member.parameter, state)
        else:
            self._joined.keep(state)

    def add_missing_state(self, first: Mapping[str, Any]) -> None:
        """Adds missing step counters. Raises `RuntimeError` if the rows lack an entry, which cannot be added later."""
        super().add_missing_state(
            {key: value for key, value in first.items() if not has_row_values(value, len(self.local))}
        )
        if lacking := first.keys() - self.state.keys():
            raise RuntimeError(
                f"table_memory: with its changed options, the optimizer needs the state {', '.join(lacking)} for each "
                f"row of {self.member.name}, but the rows are stored without it. Set the options before the first call "
                "of the model."
            )

    # -- checkpoints and reports ---------------------------------------------------------------------------------------

    def to_checkpoint(self) -> dict[str, Any]:
        """Returns the part of a checkpoint that describes the table, except its rows. No update may be pending."""
        self.member.flush()
        first = self.memory.initial.tables[self.rows.start]
        found = {"histories": self.memory.closed.to_checkpoint(self.rows), "seed": first.seed, "padding": first.padding}
        return {**found, "counters": self.counters}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restores what `to_checkpoint` has returned: everything except the table's rows."""
        tables = self.memory.initial.tables
        values = replace(tables[self.rows.start], seed=saved["seed"], padding=saved["padding"])
        self.memory.initial = InitialValuesOfTables({**tables, self.rows.start: values})
        self.history.close()
        self.memory.closed.load(self.rows, saved["histories"])
        self._set_counters(saved["counters"])

    def changed_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields, in blocks, the rows that differ from their initial values: ids (K,), and records (K, B)."""
        for rows, records in self.memory.changed_rows(self.rows):
            own = rows - self.rows.start
            yield own, self.memory.records.sign(records, own) if self.rows.start else records

    @property
    def remark(self) -> str:  # type: ignore[override]
        """Lines about the rows in memory. "" for all but the first one of tables that share the memory."""
        return "" if self.rows.start else self.memory.report

    def held_bytes(self) -> tuple[int, int]:
        weights, others = self.local.nbytes, self.memory.nbytes - self.local.nbytes
        return self._share(weights), self._share(others)

    def _share(self, nbytes: int) -> int:
        """Returns this table's share of `nbytes` that several tables use, in proportion to its number of rows."""
        return nbytes * len(self.rows) // self.memory.num_rows


def tables_larger_than_memory(tables: Mapping[str, Table]) -> dict[str, SlotRows]:
    """Returns the row stores of those tables that are larger than memory, by name."""
    return {name: table.store for name, table in tables.items() if isinstance(table.store, SlotRows)}


def first_row_state(optimizer: Optimizer, group: Mapping[str, Any], like: Tensor) -> tuple[dict[str, Column], State]:
    """Describes the optimizer state of a table, whose weights are like `like` (0, d), before its first step. Returns
    (name -> format of each entry that has a value per row, the step counters).
    """
    first = first_state(optimizer, hyperparameters(group), like.new_empty((1, *like.shape[1:])))
    of_rows = {key: value for key, value in first.items() if has_row_values(value, 1)}
    fills = {key: float(value.view(-1)[0]) if value.numel() else 0.0 for key, value in of_rows.items()}
    columns = {key: Column(tuple(v.shape[1:]), v.dtype, fills[key]) for key, v in of_rows.items()}
    return columns, {key: value for key, value in first.items() if key not in columns}
