"""Tables: the rows of one or more parameters, which are exchanged, looked up and updated as one matrix.

Contract
    A table by itself is a joined table of one: its only member is itself (`Member`).
    The gradient and the step counter of a member stay with the member.
    A member's parameter stays the same object and becomes a part (`table_shard.py`). On a single process it stays a
    plain tensor. Row ids index the part: by columns they are the table's ids, on a grid id // rows.
    Per-step work on all members avoids a Python call per member.

Shape legend: V rows, D columns; V' x d this rank's part; K rows; T members.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise, repeat
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.kernels import lookup
from embrace_fx.runtime.tables.gradient_storage import GradientStorage, TableGradient
from embrace_fx.runtime.tables.history import History
from embrace_fx.runtime.tables.local_storage import GradientFuture, Rows
from embrace_fx.runtime.tables.own_step import (
    first_state,
    has_row_values,
    hyperparameters,
    read_state_rows,
    same_options,
    state_names,
    step_tensor,
)
from embrace_fx.runtime.tables.row_store import RowStore
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.runtime.tables.update_rule import (
    DeferredUpdate,
    DenseUpdate,
    Options,
    SparseUpdate,
    can_step_rows,
    dense_update_policy,
    not_deferrable_error,
)
from embrace_fx.vocabulary.exactness import ELEMENT_WISE, STILL, RowUpdates
from embrace_fx.vocabulary.joined_table import JoinedTable
from embrace_fx.vocabulary.plan import Grid

_PARAMETER, _OPTIMIZER, _GRAD = map(attrgetter, ("parameter", "optimizer", "parameter.grad"))


class Table:
    """The rows of one or more parameters (its members), which are exchanged, looked up and updated as one matrix.

    Args:
        members: for each parameter, the table that stores only it, in the order of rows.
        bounds: the first row of each member, and the number of rows.

    Attributes:
        history: the deferred optimizer steps of the rows.
        gradient: the `.grad` of all member parameters.
    """

    shape: torch.Size
    history: History

    def __init__(self, name: str, members: Sequence[Member], bounds: Sequence[int], store: RowStore) -> None:
        self.name, self.members, self.store, self._bounds = name, tuple(members), store, bounds
        self.shape = torch.Size((bounds[-1], members[0].shape[1]))
        self.history, self.places, self.record = store.history, store.places, store.record
        self.split = partial(_split_by_member, tuple(bounds))
        """Splits rows (K, d) with sorted ids (K,) by member. Holds no reference to the members."""
        self.gradient = TableGradient(self.members)

    @classmethod
    def from_members(cls, space: JoinedTable, members: Sequence[Member]) -> Table:
        """Joins several tables that are sharded by columns into one."""
        return cls(space.name, members, space.bounds, members[0].store.join(members, space.bounds))

    @property
    def local(self) -> Tensor:
        """This rank's shard (V', d). For a table larger than memory, only the rows that are in memory."""
        return self.store.local

    @property
    def grid(self) -> Grid | None:
        """The grid on which the table is sharded, or None if it is sharded by columns."""
        return self.members[0].layout.grid

    # -- the gradient --------------------------------------------------------------------------------------------------

    def add_gradient(
        self, ids: Tensor, rows: Tensor, without_gradient: Collection[str] = (), *, unreduced: bool = False
    ) -> None:
        """Adds a gradient with unique ids (K,) and rows (K, d) to the `.grad` of all members, except
        `without_gradient`.

        Args:
            unreduced: whether the gradient is only this rank's, not yet reduced over ranks.
        """
        split = self.split
        late = GradientFuture(lambda: [[part] for part in split(ids, rows)])
        self.gradient.deliver(late, without_gradient, (ids, rows), unreduced=unreduced)

    @property
    def has_gradient(self) -> bool:
        """Whether the `.grad` of any member parameter is neither None nor zero."""
        return set(map(_GRAD, self.members)) != {None} and any(member.held is not None for member in self.members)

    def join_gradients(self, parts: Sequence[Rows]) -> Rows:
        """Concatenates gradients (ids (K,), rows (K, d)), one per member, with ids as row numbers of this table."""
        ids = torch.cat([ids + first for (ids, _), first in zip(parts, self._bounds, strict=False)])
        return ids, torch.cat([rows for _, rows in parts])

    # -- rows ----------------------------------------------------------------------------------------------------------

    def look_up(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the rows `ids` (K, d), as `dtype` if given, after applying the steps that they have deferred."""
        if self.gradient.holds and self.members[0].parameter.grad is None:
            self.gradient.free_dropped()
        store, history = self.store, self.history
        places = store.look_up(ids, to_write=(has_deferred := history.has_deferred))
        if has_deferred:
            history.apply_deferred(places)
        return lookup(store.local, places, dtype)

    def peek(self, ids: Tensor) -> Tensor:
        """Returns the rows `ids` (K, d) without applying the optimizer steps that they have deferred."""
        return self.store.local.index_select(0, self.places(ids))

    def flush(self) -> None:
        """Applies to all rows the optimizer steps that they have deferred. Do not call it during a step."""
        if self.history.has_deferred:
            self.history.close()

    # -- the optimizer -------------------------------------------------------------------------------------------------

    @property
    def optimizer_of_members(self) -> Optimizer:
        """The optimizer that updates all parameters in this table."""
        optimizer = self.members[0].optimizer
        assert optimizer is not None
        return optimizer

    def param_group(self) -> Options:
        """Returns the optimizer's param group of the parameters in this table."""
        return self.members[0].param_group()

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer state of the rows in `local`."""
        return self.store.state

    @property
    def rule(self) -> type[SparseUpdate]:
        """The class that applies the next optimizer step."""
        return self.members[0].rule

    def can_defer(self) -> bool:
        """Returns whether an update can wait for the next forward, which applies it only to the rows that it reads."""
        return self.can_update_jointly() and can_step_rows(self.param_group())

    def can_update_jointly(self) -> bool:
        """Returns whether one update of all rows gives the same result as separate updates of the parameters."""
        return self._has_one_group() and self.store.has_uniform_state()

    def _has_one_group(self) -> bool:
        """Returns whether all parameters in this table belong to one param group of one optimizer."""
        optimizer = self.members[0].optimizer
        if optimizer is None or not all(map(is_, map(_OPTIMIZER, self.members), repeat(optimizer))):
            return False
        params = self.members[0].param_group().get("params", ())
        return set(map(id, params)).issuperset(map(id, map(_PARAMETER, self.members)))

    def steps_by(self, optimizer: Optimizer | None, options: Options) -> bool:
        """Returns whether this optimizer updates all parameters in this table, currently with these options."""
        members = self.members[:1] if self._has_one_group() else self.members
        return all(member.steps_by(optimizer, options) for member in members)

    def begin_step(self) -> SparseUpdate:
        """Begins an optimizer step on all rows, if `can_update_jointly()`. Returns the object that applies it."""
        rule = self.rule
        if rule is not DeferredUpdate:
            self.flush()
        optimizer, options = self.optimizer_of_members, self.param_group()
        if can_step_rows(options):  # otherwise a step of the whole table creates missing state
            known = {key for key, value in self.store.entries.items() if value is not None}
            # Leave out the learning rate, because each rate of a schedule would get its own cache entry.
            any_lr = {**options, "lr": 0.0}
            if not known.issuperset(state_names(type(optimizer), any_lr)):
                for member in self.members:
                    member.store.add_missing_state(first_state(optimizer, options, member.local))
        return rule(self)

    def predict_rows(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Options | None]:
        """Predicts the rows `ids` (K,) after an optimizer step without gradients, from their values `rows` (K, d).
        Returns (predicted rows, options of the step), or (`rows`, None) if the step cannot be predicted or does not
        change them.
        """
        # Run a trial step only for classes of optimizers whose step is known to have no side effects.
        if (
            type(self.members[0].optimizer) not in ELEMENT_WISE
            or not self.rule.moves_all
            or not self.can_update_jointly()
        ):
            return rows, None
        rows, options = rows.clone(), hyperparameters(self.param_group())
        state = read_state_rows(self.store.state, self.places(ids), len(self.store.local))
        step_tensor(self.optimizer_of_members, options, rows, torch.zeros_like(rows), state)
        return rows, options


def _split_by_member(bounds: Sequence[int], ids: Tensor, rows: Tensor) -> list[Rows]:
    """Splits a gradient with sorted ids (K,) and rows (K, d) by member. Returns ids and rows in each member."""
    if len(bounds) == 2:
        return [(ids, rows)]
    cuts = torch.searchsorted(ids, torch.tensor(bounds, device=ids.device)).tolist()
    ends = zip(pairwise(cuts), bounds, strict=False)
    return [(ids[first:last] - first_row, rows[first:last]) for (first, last), first_row in ends]


# -- tables of one parameter -------------------------------------------------------------------------------------------


class Member(Table):
    """A table that stores a single parameter, with its gradient and its optimizer.

    Args:
        parameter: the parameter, or this rank's shard of it if the table is sharded.
        layout: the table's layout.
        row_updates: the user's option `row_updates`, which says when rows without a gradient are updated.
        may_defer: function called in each step. Returns whether updates of rows without a gradient may be deferred.
        gradients: function that returns the gradients of all sharded tables, in the same order on all ranks.
        store: function that makes this table's row store.

    Attributes:
        optimizer: the optimizer that updates the table, or None until it is known.
        is_read_densely: whether rows that no lookup has read may have a gradient. Can be True only for an unsharded
            table.
        has_sparse_gradient: whether the lookups request a sparse (COO) `.grad`.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        layout: Layout,
        row_updates: RowUpdates,
        optimizer: Optimizer | None = None,
        *,
        may_defer: Callable[[], bool] = lambda: False,
        gradients: Callable[[], Sequence[GradientStorage]] = lambda: (),
        store: Callable[[Member], RowStore] = RowStore,
    ) -> None:
        self.parameter = parameter
        self.layout, self.shape = layout, layout.shape
        self.row_updates = row_updates
        self.optimizer = optimizer
        self.is_read_densely = self.has_sparse_gradient = False
        self._at = 0, 0  # (param group, index in it) of the parameter in its optimizer, as last found
        self._may_rest = may_defer
        self._gradients = gradients
        super().__init__(layout.name, (self,), (0, layout.shape[0]), store(self))

    # -- the gradient --------------------------------------------------------------------------------------------------

    @property
    def held(self) -> GradientStorage | None:
        """The storage of the parameter's `.grad`, or None if `.grad` is None or zero."""
        held = None if self.parameter.grad is None else self.open_gradient()
        return None if held is None or held.is_zero else held

    def open_gradient(self) -> GradientStorage:
        """Returns the storage to which a backward adds gradients: that of `.grad`, or a new one of zeros."""
        gradient = self.parameter.grad
        if isinstance(gradient, TableShard) and isinstance(gradient.held, GradientStorage):
            return gradient.held
        like = self.parameter.held.stored() if isinstance(self.parameter, TableShard) else self.parameter.detach()
        held = GradientStorage(like, self.layout, self._gradients, self.store.refusal)
        if isinstance(gradient, TableShard):  # the gradient may be a shard of another layout
            if not gradient.spread.fits(self.layout):
                raise gradient.spread.report(
                    RuntimeError(
                        f"the .grad of {self.name} was set to {gradient.what}, which has other rows or columns on this "
                        f"rank. Set .grad to a full tensor of shape {tuple(self.parameter.shape)} on every rank."
                    )
                )
            held.set_dense(gradient.held.memory())
            gradient.held = held
            return held
        if gradient is not None:  # a plain gradient that the user has set
            held.set_dense(self.layout.cut(gradient).contiguous())
        sparse = self.has_sparse_gradient and gradient is None
        self.parameter.grad = TableShard(held, self.layout, "the gradient of ", sparse=sparse)
        return held

    def add_gradient(
        self, ids: Tensor, rows: Tensor, without_gradient: Collection[str] = (), *, unreduced: bool = False
    ) -> None:
        """Adds a gradient with unique ids (K,) and rows (K, d) to `.grad`, unless `without_gradient` names the
        parameter.

        Args:
            unreduced: whether the gradient is this rank's own, not yet reduced over ranks.
        """
        if self.name in without_gradient:
            return
        held = self.open_gradient()
        held.add_rows(ids, rows)
        held.unreduced = unreduced

    def add_dense_gradient(
        self, gradient: Tensor, without_gradient: Collection[str] = (), *, unreduced: bool = False
    ) -> None:
        """Adds a gradient of all rows (V', d) of this rank's shard, as `add_gradient` does."""
        if self.name not in without_gradient:
            held = self.open_gradient()
            held.add_dense(gradient)
            held.unreduced = unreduced

    def add_future_gradient(self, future: GradientFuture[Sequence[Rows]], k: int, *, unreduced: bool) -> None:
        """Sets `.grad` to the k-th gradient of a future, or adds it to a `.grad` that exists."""
        held = self.open_gradient()
        if held.is_zero:
            held.set_future(future, k)
        else:
            for rows in future.now()[k]:
                held.add_rows(*rows)
        held.unreduced = unreduced

    def waits_for(self, future: GradientFuture[Sequence[Rows]]) -> bool:
        """Returns whether `.grad` is still in flight and `future` delivers it."""
        held = self.held
        return held is not None and held.waits_for(future)

    def whole_gradient(self) -> Tensor | None:
        """Returns the gradient of the whole table (V, D), or None if there is none. Collective."""
        if self.parameter.grad is None:
            return None
        held = self.open_gradient()
        whole = self.layout.whole(held.dense())
        if not self.has_sparse_gradient:
            return whole
        own, (ids, _) = self.layout.axes[0].own, held.rows()
        read = torch.zeros(len(whole), dtype=torch.int32, device=whole.device)
        read[ids * own.step + own.start] = 1
        rows = self.layout.reduce(read, dist.ReduceOp.MAX, "rows").nonzero().view(1, -1)
        return torch.sparse_coo_tensor(rows, whole.index_select(0, rows[0]), whole.shape, is_coalesced=True)

    def add_whole_gradient(self, gradient: Tensor) -> None:
        """Adds this rank's shard of a gradient of the whole table (V, D) to `.grad`."""
        rows, columns = self.layout.axes
        if gradient.is_sparse:
            ids, values = gradient.coalesce().indices()[0] - rows.own.start, gradient.coalesce().values()
            mine = (ids >= 0) & (ids % rows.own.step == 0)
            self.add_gradient(ids[mine] // rows.own.step, values[mine][:, columns.index].contiguous())
            return
        of_rows = gradient[rows.index]
        ids = of_rows.ne(0).any(dim=1).nonzero().view(-1)
        self.add_gradient(ids, of_rows.index_select(0, ids)[:, columns.index].contiguous())

    # -- memory --------------------------------------------------------------------------------------------------------

    def predicted_bytes(self, ranks: int) -> tuple[int, int, int | None]:
        """Predicts (bytes of the weights, of the gradient, of the optimizer state) on the rank with the largest shard,
        if the table is sharded over `ranks` ranks. A gradient of single rows counts as 0 bytes. The bytes of the state
        are None while the optimizer is unknown.
        """
        if self.store.refusal:
            weights, state = self.store.held_bytes()
            return weights, 0, state
        grid, each = self.grid or Grid(1, ranks), self.local.element_size()
        rows, columns = -(-self.shape[0] // grid.rows), -(-self.shape[1] // grid.columns)
        parameters = rows * columns * each
        if self.optimizer is None or not (group := self.param_group()):
            return parameters, parameters, None
        gradient, none = parameters if self.rule is DenseUpdate else 0, self.local[:0]
        made = step_tensor(self.optimizer, hyperparameters(group), none.clone(), none.clone(), {})
        kept = sum(columns if value.dim() > 1 else 1 for value in made.values() if has_row_values(value, 0))
        return parameters, gradient, rows * kept * each

    def held_bytes(self) -> tuple[int, int, int]:
        """Returns (bytes of the weights, of the gradient, of the optimizer state) that this rank stores."""
        held, (weights, state) = self.held, self.store.held_bytes()
        return weights, 0 if held is None or held.is_in_flight else held.values().nbytes, state

    # -- steps ---------------------------------------------------------------------------------------------------------

    def param_group(self) -> Options:
        """Returns the optimizer's param group of the parameter, or {} if the training loop has removed it."""
        assert self.optimizer is not None
        groups: Sequence[dict[str, Any]] = self.optimizer.param_groups
        g, p = self._at  # try the position that the parameter had last time
        if g < len(groups) and p < len(known := groups[g]["params"]) and known[p] is self.parameter:
            return groups[g]
        for g, group in enumerate(groups):
            for p, parameter in enumerate(group["params"]):
                if parameter is self.parameter:
                    self._at = g, p
                    return group
        return {}

    def can_update_jointly(self) -> bool:
        return self.optimizer is not None

    def steps_by(self, optimizer: Optimizer | None, options: Options) -> bool:
        return self.optimizer is optimizer and same_options(options, hyperparameters(self.param_group()))

    @property
    def rule(self) -> type[SparseUpdate]:
        """The class that updates this table, for its optimizer's current options."""
        optimizer, options = self.optimizer, self.param_group()
        if optimizer is None or not options:
            return SparseUpdate  # no optimizer updates the table
        policy = dense_update_policy(type(optimizer), options, self.row_updates, self.parameter.dtype)
        if policy in STILL:
            return SparseUpdate
        if policy == "either" and self._may_rest():
            return DeferredUpdate
        if self.store.refusal:
            raise RuntimeError(not_deferrable_error(self.name, type(optimizer)))
        return DenseUpdate

    def step_dense(self) -> None:
        """Runs one optimizer step that updates all rows, for a gradient of all rows."""
        gradient = self.open_gradient().memory()
        self.flush()
        self.store.keep(step_tensor(self.optimizer_of_members, self.param_group(), self.local, gradient, self.state))
