"""Sharded tables: where a table's own part lives, where its gradient is found, and how an optimizer steps it.

A table's parameter stays the object it was and becomes a part (`part.py`); on a single process it stays a plain tensor.
Row ids are those of the part, V' x d: the table's own by columns, id // rows on a grid.

How a step moves its rows is a value of each step (`update_rule.py`).
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
    """A table updated by rows: its part on this rank, its gradient, and its optimizer.

    Args:
        parameter: the table's parameter, whose data are this rank's part.
        layout: where its parts lie.
        row_updates: the semantics the user asked for.
        may_rest: whether rows without gradient may rest, where what they skip can be made up for; asked at each step.
        gradients: those of all sharded tables, in the same order on all ranks.

    Attributes:
        optimizer: whichever steps it, once that is known.
        is_read_densely: whether, of a replica, rows without a gradient of a lookup have one.
        has_sparse_gradient: whether `.grad` looks sparse (COO), as its lookups ask for.
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
        self._at = 0, 0  # group and place in the optimizer
        self._made: object = None  # options and state of which a step makes no more state
        self._may_rest = may_rest
        self._gradients = gradients
        self.members, self.shape, self.history = (self,), layout.shape, History(self)

    @property
    def local(self) -> Tensor:
        parameter = self.parameter
        return parameter.held.now() if isinstance(parameter, Part) else parameter.detach()

    def move(self, local: Tensor) -> None:
        """Puts other memory in the place of this rank's part, with the same values."""
        assert isinstance(self.parameter, Part)
        self.parameter.held.replace(local)

    needs_host = False
    """Whether its host has to know which rows of a device are looked up."""

    def note_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Notes among which rows of the host (K,) ids of the device are, where it `needs_host`."""

    @property
    def grid(self) -> Grid | None:
        """The grid on which it lies; None: by columns."""
        return self.layout.grid

    no_dense = ""
    """Why its gradient cannot be had as a tensor of all elements; "": it can."""

    @property
    def remark(self) -> str:
        """A line about the table for reports, besides its bytes; "" if there is nothing to add."""
        return ""

    # -- the gradient --------------------------------------------------------------------------------------------------

    @property
    def held(self) -> GradientStorage | None:
        """The gradient in `.grad`; None: there is none, or it is zero."""
        held = None if self.parameter.grad is None else self.open_gradient()
        return None if held is None or held.is_zero else held

    def open_gradient(self) -> GradientStorage:
        """Returns the gradient that a backward adds to: the one in `.grad`, or a new one of zeros."""
        gradient = self.parameter.grad
        if isinstance(gradient, Part) and isinstance(gradient.held, GradientStorage):
            return gradient.held
        like = self.parameter.held.now() if isinstance(self.parameter, Part) else self.parameter.detach()
        held = GradientStorage(like, self.layout, self._gradients, self.no_dense)
        if isinstance(gradient, Part):  # computed from parts
            if not gradient.spread.fits(self.layout):
                raise gradient.refused(f"it as a gradient of {self.name}, whose rows and columns are others")
            held.set_dense(gradient.held.memory())
            gradient.held = held
            return held
        if gradient is not None:  # the user's own
            held.set_dense(self.layout.cut(gradient).contiguous())
        sparse = self.has_sparse_gradient and gradient is None
        self.parameter.grad = Part(held, self.layout, "the gradient of ", sparse=sparse)
        return held

    def add_gradient(self, ids: Tensor, rows: Tensor, absent: Collection[str] = (), *, unreduced: bool = False) -> None:
        """Adds a coalesced row gradient, ids (K,), rows (K, d), to `.grad`, unless the table is `absent`."""
        if self.name in absent:
            return
        held = self.open_gradient()
        held.add_rows(ids, rows)
        held.unreduced = unreduced

    def add_dense_gradient(self, gradient: Tensor, absent: Collection[str] = (), *, unreduced: bool = False) -> None:
        """Adds the gradient of all rows of this rank's part (V', d) to `.grad`, unless the table is `absent`."""
        if self.name not in absent:
            held = self.open_gradient()
            held.add_dense(gradient)
            held.unreduced = unreduced

    def deliver(
        self, late: GradientFuture[Sequence[Rows]], absent: Collection[str] = (), *, k: int = 0, unreduced: bool = False
    ) -> None:
        """Makes the k-th of gradients on their way that of `.grad`, or adds it, unless the table is `absent`."""
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
        """Counts, 0 or 1, whether `.grad` is one of these, nobody having looked at it."""
        held = self.held
        return int(held is not None and held.waits_for(late))

    @property
    def has_gradient(self) -> bool:
        """Whether `.grad` is not zero."""
        return self.held is not None

    def whole_gradient(self) -> Tensor | None:
        """Returns the gradient as that of the whole table (V, D), None where there is none. Collective."""
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
        """Makes this rank's part of a whole table's gradient (V, D) that of `.grad`."""
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
        """Predicts the bytes of parameters, gradient and optimizer state on the fullest of so many ranks.

        A gradient is of all rows while a step sweeps them; one in rows is small, and counts as nothing. State is as its
        optimizer makes it; None: that is not known yet.
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
        """Counts the bytes of parameters, gradient and optimizer state on this rank."""
        state = tuple(self.state.values()) if self.optimizer is not None else ()
        held = self.held
        gradient = 0 if held is None or held.is_late else held.values().nbytes
        return self.local.nbytes, gradient, sum(value.nbytes for value in state if isinstance(value, Tensor))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def param_group(self) -> Options:
        assert self.optimizer is not None
        groups: Sequence[dict[str, Any]] = self.optimizer.param_groups
        g, p = self._at  # where it was
        if g < len(groups) and p < len(known := groups[g]["params"]) and known[p] is self.parameter:
            return groups[g]
        for g, group in enumerate(groups):
            for p, parameter in enumerate(group["params"]):
                if parameter is self.parameter:
                    self._at = g, p
                    return group
        raise RuntimeError(
            f"the table {self.name} is in no param group of its optimizer any more. "
            "Do not remove or replace parameters of an optimizer after compile()."
        )

    def steps_by(self, optimizer: Optimizer | None, options: Options) -> bool:
        """Whether a step, at this moment, is one of this optimizer's under these options."""
        return self.optimizer is optimizer and same_options(options, hyperparameters(self.param_group()))

    @property
    def rule(self) -> type[SparseUpdate]:
        options = self.param_group()
        if type(self.optimizer) is RowWiseAdagrad:
            return RowWiseUpdate
        return self._rule(
            dense_update_policy(type(self.holder), options, self.row_updates, self.parameter.dtype), options
        )

    def _rule(self, way: Moving, options: Options) -> type[SparseUpdate]:
        if way in STILL:
            return SparseUpdate
        if way != "either" or not self._may_rest():
            return DenseUpdate
        kept = self.holder.state.get(self.parameter) or {}
        return DeferredUpdate if form_of(self.holder, options, kept, self.parameter.dtype) else DenseUpdate

    @property
    def lacks_state(self) -> bool:
        options = self.param_group()
        kept: Mapping[str, Any] = self.holder.state.get(self.parameter) or {}
        asked = plain_options(options, but="lr"), *kept, *map(type, kept.values())
        if asked[0] is None or self._made != asked:
            if makes_state(self.holder, options, self.local, self.state):
                return True
            self._made = asked
        return False

    def can_wait(self) -> bool:
        """Whether a step can be left to the next forward, and be taken rows by rows."""
        return self.optimizer is not None and steps_rows(self.param_group()) and not self.lacks_state

    def is_one(self) -> bool:
        return True

    @staticmethod
    def split(ids: Tensor, rows: Tensor) -> list[Rows]:
        """Returns the rows of each of them. What it is called by does not keep the table."""
        return [(ids, rows)]

    @property
    def state(self) -> Mapping[str, Any]:
        return MappingProxyType(state_of(self.holder, self.parameter))

    def keep(self, state: Mapping[str, Any]) -> None:
        keep_state(self.holder, self.parameter, state)

    def step_dense(self) -> None:
        """Takes a step by a gradient of all rows, at once."""
        self.flush()
        options, state = self.param_group(), self.state
        gradient = self.open_gradient().memory()
        self.keep(step_tensor(self.holder, options, self.local, gradient, state))
