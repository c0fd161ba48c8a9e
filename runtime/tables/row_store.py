"""Row stores: where a table's rows and their optimizer state are kept.

Contract
    A table addresses rows by *places*, which index the weights and the state.
    In memory that several tables share, the parameter and the state of each table are views. If a checkpoint or
    `Module.to` replaces them, the next use notices it and copies the new values. No use costs a Python call per table.

Shape legend: V' rows of this rank's part, d columns of it; S rows in the store's memory; K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from operator import attrgetter, is_, itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embrace_fx.runtime.tables.history import History
from embrace_fx.runtime.tables.own_step import has_row_values
from embrace_fx.runtime.tables.state_dicts import read_state, write_state
from embrace_fx.runtime.tables.table_shard import TableShard

if TYPE_CHECKING:
    from embrace_fx.runtime.tables.table import Member

_LOCAL, _PARAMETER, _HELD_LOCAL = map(attrgetter, ("parameter.held.local", "parameter", "held.local"))
_VERSION = attrgetter("_version")


class RowStore:
    """Stores a table's rows and their optimizer state. This base class keeps all rows of one table in memory.

    Attributes:
        history: the optimizer steps that rows have deferred until they are next read.
        refusal: the reason why not all rows can be in memory at once, or "" if they can.
        remark: an additional line for reports, or "".
        needs_host: whether the host must know the ids that are looked up on the device.
        joined: additional tensors that own the memory of the rows, apart from the parameters.
    """

    history: History
    refusal: str = ""
    remark: str = ""
    needs_host: bool = False
    joined: Sequence[Tensor] = ()

    def __init__(self, member: Member) -> None:
        self.member = member
        self.history = History(self)

    @property
    def local(self) -> Tensor:
        """The weights (S, d) of the rows in memory."""
        parameter = self.member.parameter
        return parameter.held.stored() if isinstance(parameter, TableShard) else parameter.detach()

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        """Returns the places (K,) of the rows `ids`, to be written if `to_write`. Valid until the next call."""
        return ids

    def look_up(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        """Returns the places (K,) of the rows `ids` for a forward, which applies deferred steps if `to_write`."""
        return ids

    def record(self, ids: Tensor, host_ids: Tensor) -> None:
        """Records that the host has `host_ids`, which include all of `ids` (K,), for tables larger than memory."""

    def record_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Records, as `record` does, that `rows` include all of `ids` (K,), and that a lookup of them follows."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer state of the rows in `local`, as plain tensors. Changes must be stored with `keep`."""
        return MappingProxyType(read_state(self.member.optimizer_of_members, self.member.parameter))

    @property
    def entries(self) -> Mapping[str, Any]:
        """The optimizer state, for inspecting its keys and types. Values may not be plain tensors."""
        return self.member.optimizer_of_members.state.get(self.member.parameter) or {}

    def has_uniform_state(self) -> bool:
        """Returns whether all tables in the store have the same state entries and equal step counters."""
        return True

    def keep(self, state: Mapping[str, Any]) -> None:
        """Stores optimizer state that a step has changed."""
        write_state(self.member.optimizer_of_members, self.member.parameter, state)

    def add_missing_state(self, first: Mapping[str, Any]) -> None:
        """Adds those entries of an initial optimizer state that the table's state lacks."""
        known = self.entries
        self.keep({key: value for key, value in first.items() if known.get(key) is None})

    def held_bytes(self) -> tuple[int, int]:
        """Returns (bytes of the weights, bytes of the optimizer state) in memory."""
        state = self.state.values() if self.member.optimizer is not None else ()
        return self.local.nbytes, sum(value.nbytes for value in state if isinstance(value, Tensor))

    def join(self, members: Sequence[Member], bounds: Sequence[int]) -> RowStore:
        """Returns one store for the rows of several tables, of which this store's is the first.

        Args:
            bounds: the first row of each table, and the total number of rows.
        """
        return JoinedRows(members, bounds)


class JoinedRows(RowStore):
    """The rows of several tables in one matrix in memory. Each table's shard is a view of it."""

    def __init__(self, members: Sequence[Member], bounds: Sequence[int]) -> None:
        self.member, self._members, self._bounds = members[0], members, bounds
        self._views: Sequence[Tensor] = ()  # each table's view of the joint matrix
        self._state = JoinedState(members, bounds)
        self.history = History(self, {first: m.history for first, m in zip(bounds, members, strict=False)})

    @property
    def local(self) -> Tensor:
        """The weights of all tables as one tensor (V', d)."""
        parts = [*map(_LOCAL, self._members)]
        # No Python call per table, because this runs ten times per step.
        if not self.joined or not all(map(is_, parts, self._views)):
            found, self._views = _join_rows(self._bounds, parts, self._use_joined_memory)
            self.joined = (found,)
        return self.joined[0]

    def _use_joined_memory(self, k: int, view: Tensor) -> None:
        """Makes `view`, a view of the joint matrix, the shard of table k."""
        parameter = self._members[k].parameter
        assert isinstance(parameter, TableShard)
        parameter.held.replace(view)

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer state of all rows, with the first table's step counters."""
        return self._state.current()

    def has_uniform_state(self) -> bool:
        return self._state.has_uniform_state()

    def keep(self, state: Mapping[str, Any]) -> None:
        of_rows = {key: value for key, value in state.items() if has_row_values(value, self._bounds[-1])}
        if of_rows:
            self._state.store_rows(of_rows)
        self._state.keep({key: value for key, value in state.items() if key not in of_rows})


def _join_rows(
    bounds: Sequence[int], parts: Sequence[Tensor], set_view: Callable[[int, Tensor], None]
) -> tuple[Tensor, list[Tensor]]:
    """Copies several tables' rows into one tensor (V', d). Returns it, and each table's view of it, which it passes to
    `set_view` with the table's index.
    """
    found = parts[0].new_empty((bounds[-1], *parts[0].shape[1:]))
    views = [found[first:last] for first, last in pairwise(bounds)]
    for k, (part, view) in enumerate(zip(parts, views, strict=True)):
        set_view(k, view.copy_(part))
    return found, views


class JoinedState:
    """The optimizer state of several tables, as one tensor per entry for the rows of all tables.

    The joined state is cached until a table's memory is replaced or other code writes a step counter. The cache holds
    no reference to parts of the state: such a reference would look like a user's.
    """

    def __init__(self, members: Sequence[Member], bounds: Sequence[int]) -> None:
        self._members, self._bounds = members, bounds
        self._of_rows: dict[str, tuple[Tensor, list[Tensor]]] = {}  # key -> all rows, and each table's view
        self._kept: list[dict[str, Any]] = []  # each table's state dict when the states were joined
        self._counters: dict[str, list[Any]] = {}  # key -> one counter per table
        self._versions: dict[str, list[int]] = {}  # key -> version of each counter that is a tensor
        self._joined: dict[str, Any] = {}
        self._is_alike = False

    def has_uniform_state(self) -> bool:
        """Returns whether all tables have the same state entries and equal step counters."""
        if not self._is_current():
            states = self._states()
            if not all(_have_equal_counters(state, states[0]) for state in states):
                return False
            self._join(states)
        return self._is_alike

    def current(self) -> dict[str, Any]:
        """Returns the state of all rows as one tensor (V', d) per entry, with the first table's step counters."""
        if not self._is_current():
            self._join(self._states())
        return dict(self._joined)

    def _states(self) -> list[dict[str, Any]]:
        """Returns each table's optimizer state."""
        return [read_state(member.optimizer_of_members, member.parameter) for member in self._members]

    def _join(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Joins the tables' optimizer states, whose entries become views, and caches the result."""
        joined, rows, known = dict(states[0]), self._bounds[1], self._of_rows
        self._of_rows = {}
        for key in [key for key, value in joined.items() if has_row_values(value, rows)]:
            parts = [each[key] for each in states]
            is_known = key in known and all(map(is_, parts, known[key][1]))
            self._of_rows[key] = (
                known[key] if is_known else _join_rows(self._bounds, parts, partial(self._use_joined_memory, key))
            )
            joined[key] = self._of_rows[key][0]
        self._joined, self._is_alike = joined, all(_have_equal_counters(state, states[0]) for state in states)
        state = self._members[0].optimizer_of_members.state
        self._kept = [state.get(member.parameter) or {} for member in self._members]
        self._counters = {key: [each.get(key) for each in self._kept] for key in joined if key not in self._of_rows}
        self._record_versions()

    def _use_joined_memory(self, key: str, k: int, view: Tensor) -> None:
        """Makes `view`, a view of the joint tensor, the state entry `key` of table k."""
        write_state(self._members[k].optimizer_of_members, self._members[k].parameter, {key: view})

    def _record_versions(self) -> None:
        """Records the version counters of the step counters, to detect writes by other code."""
        tensors = {key: values for key, values in self._counters.items() if isinstance(values[0], Tensor)}
        counted = {key: values for key, values in tensors.items() if True not in map(Tensor.is_inference, values)}
        self._versions = {key: [*map(_VERSION, values)] for key, values in counted.items()}

    def _is_current(self) -> bool:
        """Returns whether the memory is the same, and no counter was written."""
        optimizer = self._members[0].optimizer
        if not self._kept or optimizer is None:
            return False
        # By id, because hashing a parameter calls Python.
        by_id = dict(zip(map(id, optimizer.state), optimizer.state.values(), strict=True))
        kept = [*map(by_id.get, map(id, map(_PARAMETER, self._members)))]
        if not self._joined:
            return not any(kept)
        if not all(map(is_, kept, self._kept)) or set(map(len, self._kept)) != {len(self._joined)}:
            return False
        try:
            for key, counters in self._counters.items():
                if not all(map(is_, map(itemgetter(key), self._kept), counters)):
                    return False
            for key, (_, views) in self._of_rows.items():
                if not all(map(is_, map(_HELD_LOCAL, map(itemgetter(key), self._kept)), views)):
                    return False
        except (KeyError, AttributeError):  # an entry is the user's own tensor, or is missing
            return False
        now = chain.from_iterable(map(self._counters.__getitem__, self._versions))
        return [*map(_VERSION, now)] == [*chain.from_iterable(self._versions.values())]

    def store_rows(self, state: Mapping[str, Tensor]) -> None:
        """Stores entries with a value per row in the tables' states, except those that a step changed in place."""
        for key, value in state.items():
            if value is not self._joined.get(key):
                for k, (first, last) in enumerate(pairwise(self._bounds)):
                    self._use_joined_memory(key, k, value[first:last])

    def keep(self, counters: Mapping[str, Any]) -> None:
        """Stores step counters, which a step has changed, in each table's state."""
        if not counters:
            return
        if self._is_alike and self._is_current() and self._versions.keys() >= counters.keys():
            for key, value in counters.items():
                torch._foreach_copy_(self._counters[key], [value] * len(self._members))
            self._joined |= {key: self._counters[key][0] for key in counters}
            self._record_versions()
            return
        for member in self._members:
            own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in counters.items()}
            write_state(member.optimizer_of_members, member.parameter, own)


def _have_equal_counters(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two tables' states have the same entries and equal step counters."""
    counters = [key for key, value in other.items() if not isinstance(value, Tensor) or not value.dim()]
    return state.keys() == other.keys() and [state[key] for key in counters] == [other[key] for key in counters]
