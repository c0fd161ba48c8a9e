"""Finds parameters, buffers and tables for programs: always those that the model holds right now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.gradient_storage import GradientStorage
from embrace_fx.runtime.tables.joined_table import JoinedTable
from embrace_fx.runtime.tables.local_storage import Rows
from embrace_fx.runtime.tables.part import Part
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.pending_parameters import PendingUpdates
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.vocabulary.modes import outside_of_modes


class Hints(Protocol):
    """Takes, at each call for training under `lookahead`, the rows that a batch to come reads."""

    def step(self, leaves: Sequence[Any], coming: ToCome | None, ahead: int) -> None: ...

    def end_call(self) -> None: ...


_OPEN = attrgetter("history.open")


class ToCome(Protocol):
    """A batch to come."""

    def is_batch(self, leaves: Sequence[Any]) -> bool: ...

    def rows(self) -> dict[str, Tensor]: ...


def names_to_ignore(model: nn.Module) -> frozenset[str]:
    """The parameters and buffers that DDP has been told to ignore: each rank's own, neither shared nor reduced."""
    return frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


OFTEN = 2
"""Steps in a row after each of which all parameters were read."""


class ParameterReads:
    """Notices a training loop that reads all of a model's parameters in every step.

    Where all rows are wanted after each step, letting rows rest costs more than it saves. `in_every_step` changes only
    when parameters are read: nothing that a step has taken is pending then, so that one step is never taken two ways.
    """

    _in_a_row: int
    _stepped: set[int]  # ids of optimizers, since parameters were last read
    _missed: bool  # one of them has stepped twice

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets all reads: a change of the plan, while nothing is pending, reads what the loop does not."""
        self._in_a_row, self._stepped, self._missed = 0, set(), False

    @property
    def in_every_step(self) -> bool:
        """Whether the loop does so in every step."""
        return self._in_a_row >= OFTEN

    def stepped(self, optimizer: Optimizer) -> None:
        """Counts a step that an optimizer has taken."""
        self._missed |= id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))

    def note(self) -> None:
        """Counts a read of all parameters; once between two steps."""
        if self._stepped:
            self._in_a_row = 1 if self._missed else self._in_a_row + 1
            self._stepped.clear()
            self._missed = False


@dataclass(frozen=True)
class Gathered:
    """A table that has been gathered whole.

    Attributes:
        local: the memory of this rank's part at that time, which no other tensor can have while this one is kept.
        version: of that memory.
        steps: of the optimizer.
    """

    whole: Tensor
    local: Tensor
    version: int
    steps: int

    def is_of(self, local: Tensor, steps: int) -> bool:
        """Whether the table is still as it was gathered."""
        return (local.data_ptr(), local._version, steps) == (self.local.data_ptr(), self.version, self.steps)


class ModelState:
    """A model's parameters, buffers and tables.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(_owners(model, "_parameters"))
        self._buffers = dict(_owners(model, "_buffers"))
        self.names = tuple(self._parameters)
        self._note_parameters()
        self.ignored = names_to_ignore(model)
        """Parameters and buffers that each rank has for itself."""
        self.tables: dict[str, RowTable] = {}
        self.hints: Hints | None = None
        """Takes what rows batches to come read, where tables lie beyond memory."""
        self.spaces: dict[str, JoinedTable] = {}
        """Tables that are one row space, by the name of the space."""
        self.gathered: dict[str, Gathered] = {}
        """Whole tables that logits were made of outside of training."""
        self.reads = ParameterReads()
        """How often the training loop reads all parameters."""
        self.pending = PendingUpdates()
        """What is still to come of the parameters."""
        self.unreduced: set[str] = set()
        """Parameters whose `.grad` holds this rank's own sum, from backwards under `no_sync`."""
        self.reached: tuple[int, ...] = ()
        """How many ranks' backwards reach each parameter, of the last one that reduced, as `UsedParameters` counts."""
        self.hooked: frozenset[str] = frozenset()
        """Parameters with gradient hooks."""
        self.unreached: frozenset[str] = frozenset()
        """Of those, the ones that this rank's backward does not reach: their hooks do not run."""
        self.synchronised = True
        """Whether backwards reduce gradients (`no_sync`)."""
        self.graph_task = -1
        """Autograd's number of the last backward that came to a call of the model."""
        self.gradient_scale = 1.0
        """Of what this rank gives to a mean, beyond what the graph says (`join` with fewer ranks)."""
        self.awaiting_backward: WeakSet[object] = WeakSet()
        """Calls whose results the user still holds, and has not gone backward from."""

    def table(self, name: str) -> RowTable | JoinedTable:
        """Returns a table, or a row space, by its name in launches."""
        return self.spaces.get(name) or self.tables[name]

    def units(self) -> list[RowTable | JoinedTable]:
        """Lists the row spaces, and the tables that are in none."""
        joined = {id(table) for space in self.spaces.values() for table in space.members}
        return [*self.spaces.values(), *[table for table in self.tables.values() if id(table) not in joined]]

    def joined(self, tables: Iterable[RowTable]) -> Iterator[tuple[RowTable | JoinedTable, Rows]]:
        """Yields tables with their gradients: row spaces where one update is what the optimizer does to each table."""
        left = {id(table): table for table in tables}
        for space in self.spaces.values() if left else ():
            own = list(map(id, space.members))
            if left.keys() >= set(own) and space.can_wait():
                yield space, space.join([table.open_gradient().rows() for table in space.members])
                for number in own:
                    del left[number]
        yield from ((table, table.open_gradient().rows()) for table in left.values())

    def gradients(self) -> list[GradientStorage]:
        """Lists the gradients that wait at tables, in the order of the plan."""
        return [held for table in self.tables.values() if (held := table.held) is not None]

    def gradients_reader(self) -> Callable[[], list[GradientStorage]]:
        """Reads `gradients`, without keeping the tables: a `.grad` that did would keep its own parameter for ever."""
        itself = ref(self)
        return lambda: [] if (state := itself()) is None else state.gradients()

    @property
    def layouts(self) -> dict[str, Layout]:
        """Maps each name of a sharded table to the layout of its parts."""
        tables = {table.parameter: table.layout for table in self.tables.values() if table.layout.mesh is not None}
        if not tables:  # asked for in each call of a lookup layer
            return {}
        named = ((name, self.parameter(name)) for name in self.names)
        return {name: tables[parameter] for name, parameter in named if parameter in tables}

    @property
    def has_resting_rows(self) -> bool:
        """Whether any table has rows that have skipped a step."""
        # At every call and step: without a call for each table.
        return any(map(_OPEN, self.tables.values())) or any(map(_OPEN, self.spaces.values()))

    def flush_tables(self) -> None:
        """Has all rows of tables take the steps they have skipped: parameters are asked for. No update is pending."""
        with outside_of_modes():
            for table in self.units():
                table.flush()
        self.reads.note()

    def refresh(self, model: nn.Module) -> None:
        """Looks for parameters and buffers again, where modules have been replaced."""
        for known, kind in ((self._parameters, "_parameters"), (self._buffers, "_buffers")):
            known.clear()  # the same dict: others look into it
            known.update(_owners(model, kind))
        self.names = tuple(self._parameters)
        self._note_parameters()

    def _note_parameters(self) -> None:
        """Records every parameter, to be known when a module renames it, as pruning does, or loses it."""
        self._known = {name: self.parameter(name) for name in self.names}

    def parameters_were_loaded(self) -> None:
        """Takes over parameters that may be new objects."""
        self._note_parameters()
        for name, table in self.tables.items():
            table.parameter = self._known[name]

    def parameter(self, name: str) -> nn.Parameter:
        """Returns the one that the model holds now; where it holds none by this name, the one that it held."""
        owner, key = self._parameters[name]
        try:
            found: nn.Parameter | None = owner[key]
        except KeyError:
            found = None
        return self._known[name] if found is None else found

    def parameters(self, names: Collection[str] | None = None) -> list[nn.Parameter]:
        """Returns those of some names, or all, as `parameter` does, without a walk through the model's modules."""
        names = self.names if names is None else names
        try:
            return [owner[key] for owner, key in map(self._parameters.__getitem__, names)]
        except KeyError:
            return list(map(self.parameter, names))

    def table_parameters(self) -> list[nn.Parameter]:
        """Lists the parameters of the tables."""
        return [table.parameter for table in self.tables.values()]

    def any_parameter(self) -> nn.Parameter | None:
        """Returns one of the parameters, all of which are on one device; None: there is none."""
        return next(map(self.parameter, self.names), None)

    def with_unreduced(self, name: str, gradient: Tensor) -> Tensor:
        """Returns a gradient plus what backwards under `no_sync` left of it in `.grad`."""
        left = self.parameter(name).grad if name in self.unreduced else None
        if left is None:
            return gradient
        return left + gradient if gradient.is_sparse else gradient + left  # torch adds rows to a dense tensor alone

    def place_of_parameter(self, name: str) -> tuple[Mapping[str, Any], str]:
        """Finds the dict that holds it, and its key there."""
        return self._parameters[name]

    def shard_reader(self, name: str) -> Callable[[], Tensor]:
        if name in self.spaces:
            return lambda: self.spaces[name].local
        owner, key = self._parameters[name]

        def read() -> Tensor:  # another parameter may be there by then
            found = owner[key]
            return found.held.by_ids() if isinstance(found, Part) else found.detach()

        return read

    def buffers_in(self, is_meant: Callable[[dict[str, Any]], bool]) -> list[str]:
        """Returns the names of buffers in the modules' dicts of buffers that are meant."""
        return [name for name, (owner, _) in self._buffers.items() if is_meant(owner)]

    def buffer_names(self) -> list[str]:
        """Lists the name of every buffer that there is, once each."""
        found: dict[int, str] = {}
        for name, (owner, key) in self._buffers.items():
            if owner.get(key) is not None:
                found.setdefault(id(owner[key]), name)
        return list(found.values())

    def buffers_but(self, names: Collection[str]) -> list[Tensor]:
        """Returns the buffers as the model holds them now, but some."""
        found = [owner.get(key) for name, (owner, key) in self._buffers.items() if name not in names]
        return [each for each in found if each is not None]

    def place_of_buffer(self, name: str) -> tuple[Mapping[str, Any], str]:
        """As `place_of_parameter`."""
        return self._buffers[name]


def _owners(model: nn.Module, kind: str) -> list[tuple[str, tuple[dict[str, Any], str]]]:
    """(full name, (the dict that holds it, its key)) of every parameter or buffer, by every name it has."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        owner: dict[str, Any] = getattr(module, kind)
        found += [
            (f"{prefix}.{key}" if prefix else key, (owner, key)) for key, value in owner.items() if value is not None
        ]
    return found
