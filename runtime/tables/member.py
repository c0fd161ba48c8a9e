"""A table that stores a single parameter, alone or as a member of a joined table.

The table's parameter stays the same object and becomes a part (`table_shard.py`). On a single process it stays a plain
tensor. Row ids index the part, V' x d: by columns they are the table's ids, on a grid id // rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.gradient_storage import GradientStorage
from embrace_fx.runtime.tables.local_storage import GradientFuture, Rows
from embrace_fx.runtime.tables.own_step import has_row_values, hyperparameters, same_options, step_tensor
from embrace_fx.runtime.tables.row_store import RowStore
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table import Table
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.runtime.tables.update_rule import (
    DeferredUpdate,
    DenseUpdate,
    Options,
    SparseUpdate,
    dense_update_policy,
    not_deferrable_error,
)
from embrace_fx.vocabulary.exactness import STILL, RowUpdates
from embrace_fx.vocabulary.plan import Grid


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
