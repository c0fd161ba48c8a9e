"""A sharded table: its storage, its gradient, and its optimizer steps.

The table's parameter stays the same object and becomes a part (`part.py`). On a single process it stays a plain tensor.
Row ids index the part, V' x d: by columns they are the table's ids, on a grid id // rows.

Each step has an update rule (`update_rule.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.gradient_storage import GradientStorage
from embrace_fx.runtime.tables.history import History
from embrace_fx.runtime.tables.local_storage import GradientFuture, Rows
from embrace_fx.runtime.tables.optimizer_state import keep_state, state_of
from embrace_fx.runtime.tables.own_step import (
    hyperparameters,
    makes_state,
    new_state,
    plain_options,
    same_options,
    step_tensor,
)
from embrace_fx.runtime.tables.part import Part
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.skipped_steps import form_of
from embrace_fx.runtime.tables.unit import Unit
from embrace_fx.runtime.tables.update_rule import (
    DeferredUpdate,
    DenseUpdate,
    Options,
    RowWiseUpdate,
    SparseUpdate,
    dense_update_policy,
    steps_rows,
)
from embrace_fx.vocabulary.exactness import STILL, Moving, RowUpdates
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.row_wise import RowWiseAdagrad


class RowTable(Unit):
    """A table updated by rows: its part on this rank, its gradient and its optimizer.

    Args:
        parameter: the table's parameter, which holds this rank's part.
        layout: the table's layout.
        row_updates: the semantics that the user chose.
        may_rest: returns, at each step, whether updates of rows without a gradient may be deferred.
        gradients: returns the gradients of all sharded tables, in the same order on all ranks.

    Attributes:
        optimizer: the optimizer that updates the table; None until it is known.
        is_read_densely: for a replica, whether rows that no lookup read may have a gradient.
        has_sparse_gradient: whether `.grad` is sparse (COO), as the lookups request.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        layout: Layout,
        row_updates: RowUpdates,
        optimizer: Optimizer | None = None,
        *,
        may_rest: Callable[[], bool] = lambda: False,
        gradients: Callable[[], Sequence[GradientStorage]] = lambda: (),
    ) -> None:
        self.name = layout.name
        self.parameter = parameter
        self.layout = layout
        self.row_updates = row_updates
        self.optimizer = optimizer
        self.is_read_densely = self.has_sparse_gradient = False
        self._at = 0, 0  # param group and index in the optimizer
        self._made: object = None  # options and state for which a step creates no new state
        self._may_rest = may_rest
        self._gradients = gradients
        self.members, self.shape, self.history = (self,), layout.shape, History(self)

    @property
    def local(self) -> Tensor:
        """This rank's shard of the table."""
        parameter = self.parameter
        return parameter.held.now() if isinstance(parameter, Part) else parameter.detach()

    def move(self, local: Tensor) -> None:
        """Replaces the memory of this rank's part by other memory with the same values."""
        assert isinstance(self.parameter, Part)
        self.parameter.held.replace(local)

    needs_host = False
    """Whether the host must know the row ids of each lookup on the device."""

    def note_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Records which host ids (K,) the device ids come from, if the table `needs_host`."""

    @property
    def grid(self) -> Grid | None:
        """Returns the table's grid, or None if it is sharded by columns."""
        return self.layout.grid

    no_dense = ""
    """The reason why the gradient cannot be made dense; "" if it can."""

    @property
    def remark(self) -> str:
        """Returns a line about the table for reports, besides its bytes, or "" if there is none."""
        return ""

    # -- the gradient --------------------------------------------------------------------------------------------------

    @property
    def held(self) -> GradientStorage | None:
        """Returns the storage of `.grad`, or None if there is no gradient or it is zero."""
        held = None if self.parameter.grad is None else self.open_gradient()
        return None if held is None or held.is_zero else held

    def open_gradient(self) -> GradientStorage:
        """Returns the gradient that a backward adds to: `.grad`'s, or a new one of zeros."""
        gradient = self.parameter.grad
        if isinstance(gradient, Part) and isinstance(gradient.held, GradientStorage):
            return gradient.held
        like = self.parameter.held.now() if isinstance(self.parameter, Part) else self.parameter.detach()
        held = GradientStorage(like, self.layout, self._gradients, self.no_dense)
        if isinstance(gradient, Part):  # computed from parts of another layout
            if not gradient.spread.fits(self.layout):
                raise gradient.refused(f"setting it as the gradient of {self.name}, which has other rows or columns")
            held.set_dense(gradient.held.memory())
            gradient.held = held
            return held
        if gradient is not None:  # a gradient that the user has set
            held.set_dense(self.layout.cut(gradient).contiguous())
        sparse = self.has_sparse_gradient and gradient is None
        self.parameter.grad = Part(held, self.layout, "the gradient of ", sparse=sparse)
        return held

    def add_gradient(self, ids: Tensor, rows: Tensor, absent: Collection[str] = (), *, unreduced: bool = False) -> None:
        """Adds a coalesced row gradient, ids (K,) and rows (K, d), to `.grad`, unless the table is `absent`."""
        if self.name in absent:
            return
        held = self.open_gradient()
        held.add_rows(ids, rows)
        held.unreduced = unreduced

    def add_dense_gradient(self, gradient: Tensor, absent: Collection[str] = (), *, unreduced: bool = False) -> None:
        """Adds a gradient of all rows (V', d) of this rank's part to `.grad`, unless the table is `absent`."""
        if self.name not in absent:
            held = self.open_gradient()
            held.add_dense(gradient)
            held.unreduced = unreduced

    def deliver(
        self, late: GradientFuture[Sequence[Rows]], absent: Collection[str] = (), *, k: int = 0, unreduced: bool = False
    ) -> None:
        """Sets `.grad` to the k-th pending gradient, or adds that to `.grad`, unless the table is `absent`."""
        if self.name in absent:
            return
        held = self.open_gradient()
        if held.is_zero:
            held.will_be(late, k)
        else:
            for rows in late.now()[k]:
                held.add_rows(*rows)
        held.unreduced = unreduced

    def standing(self, late: GradientFuture[Sequence[Rows]]) -> int:
        """Returns 1 if `.grad` still is this future's gradient and has not been read, else 0."""
        held = self.held
        return int(held is not None and held.waits_for(late))

    @property
    def has_gradient(self) -> bool:
        """Returns whether `.grad` is not zero."""
        return self.held is not None

    def whole_gradient(self) -> Tensor | None:
        """Returns the gradient of the whole table (V, D), None if there is none. Collective."""
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
        """Adds this rank's part of a whole table's gradient (V, D) to `.grad`."""
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
        """Predicts the bytes of parameters, gradient and optimizer state on the rank with the most.

        A gradient counts all rows if steps are dense, and nothing if it is kept as rows. The bytes of state are None
        while the optimizer is unknown.
        """
        rows, columns = self.shape
        grid = self.grid or Grid(1, ranks)
        parameters = -(-rows // grid.rows) * -(-columns // grid.columns) * self.local.element_size()
        if self.optimizer is None:
            return parameters, parameters, None
        gradient = parameters if self.rule is DenseUpdate else 0
        if type(self.optimizer) is RowWiseAdagrad:
            return parameters, gradient, -(-rows // grid.rows) * self.local.element_size()
        made = new_state(self.optimizer, hyperparameters(self.param_group()), self.local)
        kept = sum(isinstance(v, Tensor) and v.shape == self.local[:0].shape for v in made.values())
        return parameters, gradient, kept * parameters

    def held_bytes(self) -> tuple[int, int, int]:
        """Returns the bytes of parameters, gradient and optimizer state on this rank."""
        state = tuple(self.state.values()) if self.optimizer is not None else ()
        held = self.held
        gradient = 0 if held is None or held.is_late else held.values().nbytes
        return self.local.nbytes, gradient, sum(value.nbytes for value in state if isinstance(value, Tensor))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def param_group(self) -> Options:
        """Returns the param group that holds the table's parameter."""
        assert self.optimizer is not None
        groups: Sequence[dict[str, Any]] = self.optimizer.param_groups
        g, p = self._at  # the index it had last time
        if g < len(groups) and p < len(known := groups[g]["params"]) and known[p] is self.parameter:
            return groups[g]
        for g, group in enumerate(groups):
            for p, parameter in enumerate(group["params"]):
                if parameter is self.parameter:
                    self._at = g, p
                    return group
        raise RuntimeError(
            f"the table {self.name} is no longer in a param group of its optimizer. "
            "Do not remove or replace parameters of an optimizer after compile()."
        )

    def steps_by(self, optimizer: Optimizer | None, options: Options) -> bool:
        """Returns whether this optimizer would update the table now, with these options."""
        return self.optimizer is optimizer and same_options(options, hyperparameters(self.param_group()))

    @property
    def rule(self) -> type[SparseUpdate]:
        """Returns the class that updates this table under its optimizer's present options."""
        options = self.param_group()
        if type(self.optimizer) is RowWiseAdagrad:
            return RowWiseUpdate
        return self._rule(
            dense_update_policy(type(self.holder), options, self.row_updates, self.parameter.dtype), options
        )

    def _rule(self, way: Moving, options: Options) -> type[SparseUpdate]:
        """Returns the update rule for an optimizer's class and options."""
        if way in STILL:
            return SparseUpdate
        if way != "either" or not self._may_rest():
            return DenseUpdate
        kept = self.holder.state.get(self.parameter) or {}
        return DeferredUpdate if form_of(self.holder, options, kept, self.parameter.dtype) else DenseUpdate

    @property
    def lacks_state(self) -> bool:
        """Returns whether the optimizer would make state for this table at its next step."""
        options = self.param_group()
        kept: Mapping[str, Any] = self.holder.state.get(self.parameter) or {}
        asked = plain_options(options, but="lr"), *kept, *map(type, kept.values())
        if asked[0] is None or self._made != asked:
            if makes_state(self.holder, options, self.local, self.state):
                return True
            self._made = asked
        return False

    def can_wait(self) -> bool:
        """Returns whether the update can be deferred to the next forward and applied by rows."""
        return self.optimizer is not None and steps_rows(self.param_group()) and not self.lacks_state

    def is_one(self) -> bool:
        """Returns whether one update can step the table, as a single table always can."""
        return True

    @staticmethod
    def split(ids: Tensor, rows: Tensor) -> list[Rows]:
        """Returns the rows of each table: here, of the one. Holds no reference to the table."""
        return [(ids, rows)]

    @property
    def state(self) -> Mapping[str, Any]:
        """Optimizer state of this rank's shard."""
        return MappingProxyType(state_of(self.holder, self.parameter))

    def keep(self, state: Mapping[str, Any]) -> None:
        """Keeps new optimizer state of this rank's shard."""
        keep_state(self.holder, self.parameter, state)

    def step_dense(self) -> None:
        """Applies a step with a gradient of all rows."""
        self.flush()
        options, state = self.param_group(), self.state
        gradient = self.open_gradient().memory()
        self.keep(step_tensor(self.holder, options, self.local, gradient, state))
