"""Gives access to the parameters, buffers and tables that a model currently has."""

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
from embrace_fx.runtime.tables.pending_parameters import PendingUpdates
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table import Member, Table
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.modes import outside_of_modes


class Prefetcher(Protocol):
    """The interface through which `lookahead` announces which rows upcoming batches read."""

    def step(self, leaves: Sequence[Any], upcoming: UpcomingBatch | None, ahead: int) -> None:
        """Prepares for a training call with these flattened arguments. `upcoming` is the batch of the call that is
        `ahead` calls later, or None if it is not known.
        """

    def end_call(self, *, train: bool) -> None:
        """Ends a call of the model, which may have been a training call."""


_OPEN = attrgetter("history.open")


class UpcomingBatch(Protocol):
    """A batch that `lookahead` has read from the data loader, before the model is called with it."""

    def is_batch(self, leaves: Sequence[Any]) -> bool:
        """Returns whether the flattened arguments of a call are this batch."""

    def rows(self) -> dict[str, Tensor]:
        """Returns the ids of the rows that the batch looks up, by table name."""


def ignored_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters and buffers that the user has excluded from DDP."""
    return frozenset(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


OFTEN = 2
"""Consecutive steps with a read of all parameters after which the loop counts as reading them in every step."""


class ParameterReads:
    """Detects a training loop that reads all parameters after every optimizer step. Deferring updates then costs more
    than it saves. `in_every_step` changes only while parameters are read, when no update is pending.
    """

    _in_a_row: int
    _stepped: set[int]  # `id()` of optimizers that have stepped after the last read of parameters
    _missed: bool  # whether an optimizer has stepped twice after the last read of parameters

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forgets all recorded reads."""
        self._in_a_row, self._stepped, self._missed = 0, set(), False

    @property
    def in_every_step(self) -> bool:
        """Whether the training loop reads all parameters after every step."""
        return self._in_a_row >= OFTEN

    def record_step(self, optimizer: Optimizer) -> None:
        """Records that `optimizer` has run a step."""
        self._missed |= id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))

    def record(self) -> None:
        """Records that all parameters have been read."""
        if self._stepped:
            self._in_a_row = 1 if self._missed else self._in_a_row + 1
            self._stepped.clear()
            self._missed = False


@dataclass(frozen=True)
class GatheredTable:
    """A cached copy of a whole table, and the shard, its version and the number of optimizer steps when it was
    gathered.

    Attributes:
        local: this rank's shard. The reference prevents its memory from being reused for another tensor.
    """

    whole: Tensor
    local: Tensor
    version: int
    steps: int

    def is_current(self, local: Tensor, steps: int) -> bool:
        """Returns whether the copy has the current values of the shard `local`, after `steps` optimizer steps."""
        return (local.data_ptr(), local._version, steps) == (self.local.data_ptr(), self.version, self.steps)


class ModelState:
    """Gives access to the current parameters, buffers and embedding tables of the user's model."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(_find_owners(model, "_parameters"))
        self._buffers = dict(_find_owners(model, "_buffers"))
        self.names = tuple(self._parameters)
        self._record_parameters()
        self.ignored = self.unshared_buffers = ignored_names(model)
        """Names of parameters and buffers that each rank keeps for itself, as with DDP. `unshared_buffers` also has the
        buffers that are registered, or set for the first time, after `compile()`.
        """
        self.tables: dict[str, Member] = {}
        self.hints: Prefetcher | None = None
        """Receives the rows of upcoming batches if tables are larger than memory."""
        self.spaces: dict[str, Table] = {}
        """Name of a joined table -> its tables as one."""
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
        """Returns the table, or the joined table, with this name."""
        return self.spaces.get(name) or self.tables[name]

    def units(self) -> list[Table]:
        """Returns the joined tables and all other tables. The rows of each are exchanged together."""
        joined = {id(table) for space in self.spaces.values() for table in space.members}
        return [*self.spaces.values(), *[table for table in self.tables.values() if id(table) not in joined]]

    def group_by_joined_table(self, tables: Iterable[Member]) -> Iterator[tuple[Table, Rows]]:
        """Yields (table, its gradient as ids and rows), with tables joined that one update can change together."""
        left = {id(table): table for table in tables}
        for space in self.spaces.values() if left else ():
            own = list(map(id, space.members))
            if left.keys() >= set(own) and space.can_defer():
                yield space, space.join_gradients([table.open_gradient().rows() for table in space.members])
                for number in own:
                    del left[number]
        yield from ((table, table.open_gradient().rows()) for table in left.values())

    def gradients(self) -> list[GradientStorage]:
        """Returns the gradient storages of all tables that have a gradient, in the order of `tables`."""
        return [held for table in self.tables.values() if (held := table.held) is not None]

    def gradients_reader(self) -> Callable[[], list[GradientStorage]]:
        """Returns a function that returns `gradients()`. It holds only a weak reference to this object."""
        itself = ref(self)
        return lambda: [] if (state := itself()) is None else state.gradients()

    @property
    def layouts(self) -> dict[str, Layout]:
        """Maps the name of each sharded table to its layout."""
        tables = {table.parameter: table.layout for table in self.tables.values() if table.layout.mesh is not None}
        if not tables:  # fast path, because every call of a lookup layer comes here
            return {}
        named = ((name, self.parameter(name)) for name in self.names)
        return {name: tables[parameter] for name, parameter in named if parameter in tables}

    @property
    def has_deferred_rows(self) -> bool:
        """Whether any table has rows with deferred optimizer updates, which are applied when the rows are next read."""
        # This runs several times per step, so it makes no Python call per table.
        return any(map(_OPEN, self.tables.values())) or any(map(_OPEN, self.spaces.values()))

    def flush_tables(self) -> None:
        """Applies the deferred optimizer updates of all rows. No optimizer step may be pending."""
        with outside_of_modes():
            for table in self.units():
                table.flush()
        self.reads.record()

    def refresh(self, model: nn.Module) -> None:
        """Looks up parameters and buffers again, after modules of the model were replaced."""
        for known, kind in ((self._parameters, "_parameters"), (self._buffers, "_buffers")):
            known.clear()  # change the dict in place, because other objects hold references to it
            known.update(_find_owners(model, kind))
        self.names = tuple(self._parameters)
        self._record_parameters()

    def find_new_buffers(self, model: nn.Module) -> None:
        """Looks up the buffers that were registered, or set for the first time, since the last lookup."""
        found = dict(_find_owners(model, "_buffers"))
        self.unshared_buffers |= found.keys() - self._buffers.keys()
        self._buffers.update(found)

    def _record_parameters(self) -> None:
        """Records every parameter by name, to recognize parameters that are renamed or removed later."""
        self._known = {name: self.parameter(name) for name in self.names}

    def parameters_were_loaded(self) -> None:
        """Updates the recorded parameters after a state dict was loaded, which may have replaced parameter objects."""
        self._record_parameters()
        for name, table in self.tables.items():
            table.parameter = self._known[name]

    def parameter(self, name: str) -> nn.Parameter:
        """Returns the parameter with this name, or the last one that had it if the model no longer has one."""
        owner, key = self._parameters[name]
        try:
            found: nn.Parameter | None = owner[key]
        except KeyError:
            found = None
        return self._known[name] if found is None else found

    def parameters(self, names: Collection[str] | None = None) -> list[nn.Parameter]:
        """Returns the parameters with these names, or all parameters if `names` is None."""
        names, found = self.names if names is None else names, list[nn.Parameter]()
        try:
            for owner, key in map(self._parameters.__getitem__, names):  # inlined, because it runs several times a step
                found.append(owner[key])
        except KeyError:
            return list(map(self.parameter, names))
        return found

    def table_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that are stored in tables."""
        return [table.parameter for table in self.tables.values()]

    def any_parameter(self) -> nn.Parameter | None:
        """Returns the model's first parameter, as an example of its device, or None if the model has no parameters."""
        return next(map(self.parameter, self.names), None)

    def with_unreduced(self, name: str, gradient: Tensor) -> Tensor:
        """Returns the sum of a parameter's `gradient` and of what this rank has accumulated for it under `no_sync`."""
        left = self.parameter(name).grad if name in self.unreduced else None
        if left is None:
            return gradient
        # Torch supports dense + sparse, but not sparse + dense.
        return left + gradient if gradient.is_sparse else gradient + left

    def place_of_parameter(self, name: str) -> tuple[Mapping[str, Any], str]:
        """Returns where a parameter is stored: (the `_parameters` dict of its module, its key in that dict)."""
        return self._parameters[name]

    def shard_reader(self, name: str) -> Callable[[], Tensor]:
        """Returns a function that returns this rank's current shard of a table."""
        if name in self.spaces:
            return lambda: self.spaces[name].local
        owner, key = self._parameters[name]

        # Look the parameter up at each call, because the module may hold another one by then.
        def read_shard() -> Tensor:
            """Returns this rank's shard of the parameter that the module has now."""
            found = owner[key]
            return found.held.by_ids() if isinstance(found, TableShard) else found.detach()

        return read_shard

    def buffers_in(self, selects: Callable[[dict[str, Any]], bool]) -> list[str]:
        """Returns the names of the buffers in modules whose dict of buffers `selects` chooses."""
        return [name for name, (owner, _) in self._buffers.items() if selects(owner)]

    def buffer_names(self) -> list[str]:
        """Returns one name for each buffer, even if several modules share it."""
        found: dict[int, str] = {}
        for name, (owner, key) in self._buffers.items():
            if owner.get(key) is not None:
                found.setdefault(id(owner[key]), name)
        return list(found.values())

    def buffers_except(self, names: Collection[str]) -> list[Tensor]:
        """Returns all buffers except those with these names."""
        found = [owner.get(key) for name, (owner, key) in self._buffers.items() if name not in names]
        return [each for each in found if each is not None]

    def place_of_buffer(self, name: str) -> tuple[Mapping[str, Any], str]:
        """Returns where a buffer is stored: (the `_buffers` dict of its module, its key in that dict)."""
        return self._buffers[name]


def _find_owners(model: nn.Module, kind: str) -> list[tuple[str, tuple[dict[str, Any], str]]]:
    """Returns (name, (its module's dict, its key there)) of all parameters or buffers; `kind` names the dicts."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        owner: dict[str, Any] = getattr(module, kind)
        found += [
            (f"{prefix}.{key}" if prefix else key, (owner, key)) for key, value in owner.items() if value is not None
        ]
    return found
