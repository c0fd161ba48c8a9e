"""Looks up the parameters, buffers and tables that the model has at the moment of the lookup."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakSet, ref

from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.gradient_storage import GradientStorage
from embrace_fx.runtime.tables.local_storage import Rows
from embrace_fx.runtime.tables.member import Member
from embrace_fx.runtime.tables.pending_parameters import PendingUpdates
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table import Table
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.modes import outside_of_modes


class Prefetcher(Protocol):
    """The interface for prefetching: receives the rows that upcoming batches read, under `lookahead`."""

    def step(self, leaves: Sequence[Any], coming: UpcomingBatch | None, ahead: int) -> None:
        """Receives the arguments of a training call, and the batch of `ahead` calls later if it is known."""

    def end_call(self, *, train: bool) -> None:
        """Ends a call of the model."""


_OPEN = attrgetter("history.open")


class UpcomingBatch(Protocol):
    """The interface of an upcoming batch."""

    def is_batch(self, leaves: Sequence[Any]) -> bool:
        """Returns whether flattened arguments are those of this batch."""

    def rows(self) -> dict[str, Tensor]:
        """Returns the rows that the batch looks up in each table."""


def ignored_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of parameters and buffers that DDP ignores: each rank keeps its own."""
    return frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


OFTEN = 2
"""Consecutive steps with a read of all parameters after which the loop counts as reading them in every step."""


class ParameterReads:
    """Detects a training loop that reads all parameters in every step.

    Deferring row updates costs more than it saves if all rows are read after each step. `in_every_step` changes only
    while parameters are read: no update is pending then, so that a step is never applied in two ways.
    """

    _in_a_row: int
    _stepped: set[int]  # ids of optimizers that have stepped since the last read
    _missed: bool  # an optimizer has stepped twice since the last read

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets all reads. A changed plan reads parameters although the loop does not."""
        self._in_a_row, self._stepped, self._missed = 0, set(), False

    @property
    def in_every_step(self) -> bool:
        """Returns whether the loop reads all parameters in every step."""
        return self._in_a_row >= OFTEN

    def record_step(self, optimizer: Optimizer) -> None:
        """Records that an optimizer has stepped."""
        self._missed |= id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))

    def record(self) -> None:
        """Records a read of all parameters. Several reads between two steps count once."""
        if self._stepped:
            self._in_a_row = 1 if self._missed else self._in_a_row + 1
            self._stepped.clear()
            self._missed = False


@dataclass(frozen=True)
class GatheredTable:
    """A table that was gathered, with what is needed to tell whether it is still current.

    Attributes:
        local: this rank's part at that time. The reference keeps the memory from being reused for another tensor.
        version: version counter of `local`.
        steps: number of optimizer steps.
    """

    whole: Tensor
    local: Tensor
    version: int
    steps: int

    def is_current(self, local: Tensor, steps: int) -> bool:
        """Returns whether the table has not changed since it was gathered: same part, same number of steps."""
        return (local.data_ptr(), local._version, steps) == (self.local.data_ptr(), self.version, self.steps)


class ModelState:
    """The parameters, buffers and tables that a model has now.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(_find_owners(model, "_parameters"))
        self._buffers = dict(_find_owners(model, "_buffers"))
        self.names = tuple(self._parameters)
        self._record_parameters()
        self.ignored = ignored_names(model)
        """Names of parameters and buffers that each rank keeps for itself, as with DDP."""
        self.tables: dict[str, Member] = {}
        self.hints: Prefetcher | None = None
        """Receives the rows of upcoming batches if tables lie beyond memory."""
        self.spaces: dict[str, Table] = {}
        """Name of a row space -> its tables as one."""
        self.gathered: dict[str, GatheredTable] = {}
        """Whole tables, gathered for logits outside of training."""
        self.reads = ParameterReads()
        """Detects a loop that reads all parameters in every step."""
        self.pending = PendingUpdates()
        """Pending updates of the parameters."""
        self.unreduced: set[str] = set()
        """Names of parameters whose `.grad` is this rank's own sum, from backwards under `no_sync`."""
        self.reached: tuple[int, ...] = ()
        """The number of ranks whose backward reached each parameter, in the last reducing backward."""
        self.hooked: frozenset[str] = frozenset()
        """Parameters with gradient hooks."""
        self.unreached: frozenset[str] = frozenset()
        """Hooked parameters that this rank's backward does not reach: their hooks do not run."""
        self.synchronised = True
        """Whether backwards reduce gradients (`no_sync`)."""
        self.graph_task = -1
        """Autograd's number of the last backward through the model."""
        self.gradient_scale = 1.0
        """Factor of this rank's gradients in the mean, besides the graph's (`join` with fewer ranks)."""
        self.awaiting_backward: WeakSet[object] = WeakSet()
        """Calls whose results are alive and have had no backward."""

    def table(self, name: str) -> Table:
        """Returns the table or row space that launches name."""
        return self.spaces.get(name) or self.tables[name]

    def units(self) -> list[Table]:
        """Returns the tables that are exchanged: row spaces, and tables outside of row spaces."""
        joined = {id(table) for space in self.spaces.values() for table in space.members}
        return [*self.spaces.values(), *[table for table in self.tables.values() if id(table) not in joined]]

    def group_by_space(self, tables: Iterable[Member]) -> Iterator[tuple[Table, Rows]]:
        """Yields (table, gradient): a row space where one joint update equals an update per table, else its tables."""
        left = {id(table): table for table in tables}
        for space in self.spaces.values() if left else ():
            own = list(map(id, space.members))
            if left.keys() >= set(own) and space.can_defer():
                yield space, space.join_gradients([table.open_gradient().rows() for table in space.members])
                for number in own:
                    del left[number]
        yield from ((table, table.open_gradient().rows()) for table in left.values())

    def gradients(self) -> list[GradientStorage]:
        """Returns the stored gradients of the tables, in the order of the plan."""
        return [held for table in self.tables.values() if (held := table.held) is not None]

    def gradients_reader(self) -> Callable[[], list[GradientStorage]]:
        """Returns a function that calls `gradients`, and that refers to the tables only weakly."""
        itself = ref(self)
        return lambda: [] if (state := itself()) is None else state.gradients()

    @property
    def layouts(self) -> dict[str, Layout]:
        """Maps each name of a sharded table to its layout."""
        tables = {table.parameter: table.layout for table in self.tables.values() if table.layout.mesh is not None}
        if not tables:  # a plain dict lookup, because every call of a lookup layer does it
            return {}
        named = ((name, self.parameter(name)) for name in self.names)
        return {name: tables[parameter] for name, parameter in named if parameter in tables}

    @property
    def has_deferred_rows(self) -> bool:
        """Returns whether any table has rows with deferred updates."""
        # A hot path of every step: no Python call per table.
        return any(map(_OPEN, self.tables.values())) or any(map(_OPEN, self.spaces.values()))

    def flush_tables(self) -> None:
        """Applies the deferred updates of all tables, before parameters are read. Requires that no step is pending."""
        with outside_of_modes():
            for table in self.units():
                table.flush()
        self.reads.record()

    def refresh(self, model: nn.Module) -> None:
        """Looks parameters and buffers up again, after modules were replaced."""
        for known, kind in ((self._parameters, "_parameters"), (self._buffers, "_buffers")):
            known.clear()  # change the dict in place, because other objects refer to it
            known.update(_find_owners(model, kind))
        self.names = tuple(self._parameters)
        self._record_parameters()

    def _record_parameters(self) -> None:
        """Records every parameter, so that renamed or removed ones are recognized."""
        self._known = {name: self.parameter(name) for name in self.names}

    def parameters_were_loaded(self) -> None:
        """Takes over parameters after a load, which may have replaced the objects."""
        self._record_parameters()
        for name, table in self.tables.items():
            table.parameter = self._known[name]

    def parameter(self, name: str) -> nn.Parameter:
        """Returns the current parameter of a name, or the last one if the model no longer has that name."""
        owner, key = self._parameters[name]
        try:
            found: nn.Parameter | None = owner[key]
        except KeyError:
            found = None
        return self._known[name] if found is None else found

    def parameters(self, names: Collection[str] | None = None) -> list[nn.Parameter]:
        """Returns the parameters of `names`, or all, without walking the modules."""
        names, found = self.names if names is None else names, list[nn.Parameter]()
        try:
            for owner, key in map(self._parameters.__getitem__, names):  # inlined, because it runs several times a step
                found.append(owner[key])
        except KeyError:
            return list(map(self.parameter, names))
        return found

    def table_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the tables."""
        return [table.parameter for table in self.tables.values()]

    def any_parameter(self) -> nn.Parameter | None:
        """Returns one parameter, for the device that all share, or None if the model has none."""
        return next(map(self.parameter, self.names), None)

    def with_unreduced(self, name: str, gradient: Tensor) -> Tensor:
        """Returns a gradient plus the sum that backwards under `no_sync` have left in the parameter's `.grad`."""
        left = self.parameter(name).grad if name in self.unreduced else None
        if left is None:
            return gradient
        # Torch adds a sparse tensor only to a dense one.
        return left + gradient if gradient.is_sparse else gradient + left

    def place_of_parameter(self, name: str) -> tuple[Mapping[str, Any], str]:
        """Returns the module's dict that holds a parameter, and the key in it."""
        return self._parameters[name]

    def shard_reader(self, name: str) -> Callable[[], Tensor]:
        """Returns a function that reads the shard of a table or row space."""
        if name in self.spaces:
            return lambda: self.spaces[name].local
        owner, key = self._parameters[name]

        def read_shard() -> Tensor:  # the dict may hold another parameter by then
            """Reads the shard from the parameter that the module holds now."""
            found = owner[key]
            return found.held.by_ids() if isinstance(found, TableShard) else found.detach()

        return read_shard

    def buffers_in(self, is_meant: Callable[[dict[str, Any]], bool]) -> list[str]:
        """Returns the names of the buffers whose owner `is_meant` selects.

        Args:
            is_meant: (dict of buffers of a module) -> whether to return its buffers.
        """
        return [name for name, (owner, _) in self._buffers.items() if is_meant(owner)]

    def buffer_names(self) -> list[str]:
        """Returns one name of every buffer."""
        found: dict[int, str] = {}
        for name, (owner, key) in self._buffers.items():
            if owner.get(key) is not None:
                found.setdefault(id(owner[key]), name)
        return list(found.values())

    def buffers_except(self, names: Collection[str]) -> list[Tensor]:
        """Returns all buffers except those named."""
        found = [owner.get(key) for name, (owner, key) in self._buffers.items() if name not in names]
        return [each for each in found if each is not None]

    def place_of_buffer(self, name: str) -> tuple[Mapping[str, Any], str]:
        """Returns the module's dict that holds a buffer, and the key in it."""
        return self._buffers[name]


def _find_owners(model: nn.Module, kind: str) -> list[tuple[str, tuple[dict[str, Any], str]]]:
    """Returns, for every name of a parameter or buffer, the dict that holds it and its key.

    Args:
        kind: the attribute of modules that holds them: "_parameters" or "_buffers".
    """
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        owner: dict[str, Any] = getattr(module, kind)
        found += [
            (f"{prefix}.{key}" if prefix else key, (owner, key)) for key, value in owner.items() if value is not None
        ]
    return found
