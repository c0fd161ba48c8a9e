"""Sharded tables: where a table's own part lives, where its gradient is found, and how an optimizer steps it.

A table's parameter stays the object it was and becomes a part (`part.py`); on a single process it stays a plain tensor.
Row ids are those of the part, V' x d: the table's own by columns, id // rows on a grid.

Contract of a step
    `begin_step` keeps the options of its moment; `apply` then updates rows that are to be read next, by their
    gradients, and `finish` all others, with gradients and, where the optimizer moves those too, without.
    Each row is updated once, as if the optimizer had stepped the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.held_gradient import HeldGradient, Rows
from embrace_fx.runtime.tables.layouts import Place, own_part, whole_table
from embrace_fx.runtime.tables.own_step import (
    hyperparameters,
    makes_state,
    new_state,
    put_rows,
    rows_of_state,
    same_options,
    step_rows,
    step_tensor,
)
from embrace_fx.runtime.tables.part import Origin, Part
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.part_state import PartState
from embrace_fx.runtime.tables.resting import RestingRows
from embrace_fx.runtime.tables.row_optimizers import row_optimizer
from embrace_fx.runtime.tables.skipped_steps import form_of
from embrace_fx.runtime.tables.table_part import TablePart
from embrace_fx.vocabulary.exactness import ELEMENT_WISE, RowUpdates, row_update_blocker
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.row_wise import RowWiseAdagrad, new_sums

Options = Mapping[str, Any]
"""Those of a param group, as of one step."""


@dataclass(frozen=True)
class Supposed:
    """A step that rows sent early have taken already: whose, and under which options."""

    optimizer: Optimizer | None
    options: Options


class RowTable:
    """A table updated by rows: its part on this rank, its gradient, and its optimizer.

    Args:
        name: the parameter's name.
        parameter: the table's parameter, whose data are this rank's part.
        place: where its parts lie.
        communicator: the ranks that have the other parts; None: there are none.
        row_updates: the semantics the user asked for.
        may_rest: whether rows without gradient may rest, where what they skip can be made up for; asked at each step.
        gradients: those of all sharded tables, in the same order on all ranks.

    Attributes:
        optimizer: whichever steps it, once that is known.
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        place: Place,
        communicator: Communicator | None,
        row_updates: RowUpdates,
        optimizer: Optimizer | None = None,
        *,
        may_rest: Callable[[], bool] = lambda: False,
        gradients: Callable[[], Sequence[HeldGradient]] = lambda: (),
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.place = place
        self.row_updates = row_updates
        self.optimizer = optimizer
        self._communicator = communicator
        self._applied: list[Tensor] = []  # rows that the step under way has updated
        self._may_rest = may_rest
        self._gradients = gradients
        self._resting = RestingRows()
        self._layout = Layout.of_table(place)
        self._gradient_origin = Origin(name, "the gradient of ", place.mesh, communicator)

    @property
    def local(self) -> Tensor:
        """This rank's part, (V', d)."""
        parameter = self.parameter
        return parameter.held.now() if isinstance(parameter, TablePart) else parameter.detach()

    def move(self, local: Tensor) -> None:
        """Puts other memory in the place of this rank's part, with the same values."""
        assert isinstance(self.parameter, TablePart)
        self.parameter.held.replace(local)

    @property
    def joined(self) -> tuple[Tensor, ...]:
        """Tensors besides the parameter that hold the table's memory: none."""
        return ()

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole table, (V, D)."""
        return self.place.shape

    @property
    def grid(self) -> Grid | None:
        """The grid on which it lies; None: by columns."""
        return self.place.grid

    # -- the gradient --------------------------------------------------------------------------------------------------

    @property
    def held(self) -> HeldGradient | None:
        """The gradient in `.grad`; None: there is none, or it is zero."""
        held = None if self.parameter.grad is None else self.open_gradient()
        return None if held is None or held.is_zero else held

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient waits for the next step."""
        return self.held is not None

    def open_gradient(self) -> HeldGradient:
        """Returns the gradient that a backward adds to: the one in `.grad`, or a new one of zeros."""
        gradient = self.parameter.grad
        if isinstance(gradient, Part) and isinstance(gradient.held, HeldGradient):
            return gradient.held
        held = HeldGradient(self.local, self._communicator, self._gradients)
        if isinstance(gradient, Part):  # computed from parts
            if not gradient.spread.fits(self._layout):
                raise gradient.origin.refused(f"it as a gradient of {self.name}, whose rows and columns are others")
            held.set_dense(gradient.held.memory())
            gradient.held = held
            return held
        if gradient is not None:  # the user's own
            held.set_dense(self._layout.cut(gradient).contiguous())
        self.parameter.grad = TablePart(held, self._layout, self._gradient_origin)
        return held

    def add_gradient(self, ids: Tensor, rows: Tensor) -> None:
        """Adds a coalesced row gradient, ids (K,), rows (K, d), to `.grad`."""
        self.open_gradient().add_rows(ids, rows)

    def clear_gradient(self) -> None:
        self.parameter.grad = None

    def dense_gradient(self, group: dist.ProcessGroup | None) -> Tensor | None:
        """The gradient as that of the whole table (V, D), None where there is none. Collective."""
        held = self.held
        return None if held is None else whole_table(self.place.shard(held.dense()), group)

    def add_dense_gradient(self, gradient: Tensor) -> None:
        """Makes this rank's part of a whole table's gradient (V, D) that of `.grad`."""
        assert self.place.mesh is not None
        rows, columns = own_part(gradient.shape, self.place.mesh)
        of_rows = gradient[rows]
        ids = of_rows.ne(0).any(dim=1).nonzero().view(-1)
        self.add_gradient(ids, of_rows.index_select(0, ids)[:, columns].contiguous())

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
        options = self.param_group()
        gradient = parameters if self.is_swept(options) else 0
        if self.takes_rows_only:
            return parameters, gradient, None
        made = new_state(self.optimizer, hyperparameters(options), self.local)
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
        """The options of this moment."""
        for group in self.holder.param_groups:
            if any(parameter is self.parameter for parameter in group["params"]):
                found: Options = group
                return found
        raise RuntimeError(
            f"expected the optimizer to hold the table {self.name}, found it in none of its param groups. "
            "Do not remove or replace parameters of an optimizer after compile."
        )

    @property
    def holder(self) -> Optimizer:
        """The optimizer that steps it."""
        assert self.optimizer is not None
        return self.optimizer

    def moves_all(self, options: Options) -> bool:
        """Whether the optimizer moves rows without gradient too."""
        return not self.takes_rows_only and row_update_blocker(self.holder, options, self.row_updates) is not None

    def rests(self, options: Options) -> bool:
        """Whether rows without gradient rest in a step, and move later."""
        if not self._may_rest() or not self.moves_all(options):
            return False
        return form_of(self.holder, options, self.state, self.local.dtype) is not None

    def is_swept(self, options: Options) -> bool:
        """Whether a step moves all rows at once."""
        return self.moves_all(options) and not self.rests(options)

    @property
    def has_resting_rows(self) -> bool:
        """Whether any row may have skipped a step."""
        return self._resting.rest

    def catch_up(self, ids: Tensor) -> bool:
        """Lets rows take skipped steps before they are read; returns whether any may have been written."""
        return self._resting.rest and self._resting.catch_up(self.local, self.state, ids)

    def settle(self) -> None:
        """Has all rows take the steps they have skipped; not between `begin_step` and `finish`."""
        if self._resting.rest:
            self._resting.settle(self.local, self.state)

    def steps_in_parts(self) -> bool:
        """Whether a step can be taken rows by rows: its state is there for all rows."""
        options = self.param_group()
        if options.get("differentiable") or (isinstance(options["lr"], Tensor) and options["lr"].requires_grad):
            return False
        return not self.moves_all(options) or not makes_state(self.holder, options, self.local, self.state)

    def steps_as_one(self) -> bool:
        """Whether its rows are updated alike: they are all of one table."""
        return self.optimizer is not None

    @property
    def members(self) -> tuple[RowTable, ...]:
        """The tables that are updated as one: itself."""
        return (self,)

    def split(self, ids: Tensor, rows: Tensor) -> list[Rows]:
        """The rows of each of them."""
        return [(ids, rows)]

    @property
    def state(self) -> MutableMapping[str, Any]:
        """The optimizer's state of the table, this rank's parts as plain tensors."""
        return PartState(self.holder, self.parameter)

    def begin_step(self) -> Options:
        """Counts one iteration; returns the options of this moment."""
        group = self.param_group()
        self._applied = []
        if self.rests(group):
            self._resting.begin(self.holder, group, self.local, self.state)
            return group
        self.settle()
        if not self.moves_all(group):
            self.count_step(group)
        return group

    def count_step(self, options: Options) -> None:
        """Counts one iteration of a table whose rows without gradient stand still."""
        row_optimizer(type(self.holder)).advance(self.made_state(options))

    def apply(self, ids: Tensor, rows: Tensor, options: Options) -> None:
        """Updates rows `ids` (K,), sorted and unique, by their gradients (K, d), under the options of their step.

        One step's rows may come in several parts, none in two of them.
        """
        if self.rests(options):
            self._resting.update(self.holder, options, self.local, self.state, ids, rows)
        elif self.moves_all(options):
            step_rows(self.holder, options, self.local, self.state, ids, rows)
            self._applied.append(ids)
        else:
            row_optimizer(type(self.holder)).apply(self.local, self.made_state(options), ids, rows, options)

    def finish(self, parts: Sequence[Rows], options: Options) -> None:
        """Updates the rows that the step has not updated yet: by their gradients, ids (K,) and rows (K, d), or without
        any."""
        if self.rests(options) or not self.moves_all(options):
            for ids, rows in parts:
                self.apply(ids, rows, options)
            if self.rests(options):
                self._resting.end(self.holder, options, self.local, self.state)
            return
        applied, self._applied = self._applied, []
        sweep(self.holder, options, self.local, self.state, parts, applied)

    def step_dense(self) -> None:
        """Takes a step by a gradient of all rows, at once."""
        self.settle()
        options, state = self.param_group(), self.state
        gradient = self.open_gradient().memory()
        state.update(step_tensor(self.holder, options, self.local, gradient, state))

    def may_move(self) -> bool:
        """Whether rows without gradient may move in the next step."""
        return self.optimizer is None or self.moves_all(self.param_group())

    def coming(self, ids: Tensor) -> tuple[Tensor, Supposed]:
        """Rows of the table (K, d) as the next step will leave them, if it gives them no gradient; and that step."""
        self.catch_up(ids)
        rows = self.local.index_select(0, ids)
        if type(self.optimizer) not in ELEMENT_WISE:  # of another one's step a trial could leave something behind
            return rows, Supposed(None, {})
        assert self.optimizer is not None
        state = rows_of_state(self.state, ids, self.local.shape[0])
        return rows, suppose(self.optimizer, self.param_group(), rows, state)

    def is_as(self, supposed: Supposed) -> bool:
        """Whether the step that was just taken is the one supposed."""
        now = hyperparameters(self.param_group())
        return supposed.optimizer is self.optimizer and same_options(supposed.options, now)

    def update_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Applies a gradient once, at once, where rows without gradient stand still, or rest."""
        if type(self.holder) is RowWiseAdagrad:
            self._update_row_wise(ids, rows)
        else:
            self.finish([(ids, rows)], self.begin_step())

    def _update_row_wise(self, ids: Tensor, rows: Tensor) -> None:
        """Updates rows whose step depends on all of their elements, of which every rank has some. Collective."""
        options, state = dict(self.param_group()), self.state
        if not state:
            state["sum"] = new_sums(self.local, options)
        squares = rows.square().sum(1)
        if self._communicator is not None:
            squares = self._communicator.reduce_scalar(squares, dist.ReduceOp.SUM)
        sums = state["sum"].index_select(0, ids).add_(squares.div_(self.shape[1]))
        state["sum"].index_copy_(0, ids, sums)
        steps = options["lr"] * rows / sums.sqrt_().add_(options["eps"]).unsqueeze(1)
        self.local.index_copy_(0, ids, self.local.index_select(0, ids).sub_(steps))

    def made_state(self, options: Options) -> MutableMapping[str, Any]:
        """The optimizer's own state of a table whose rows without gradient stand still, made at its first update."""
        state = self.state
        if not state:
            state.update(row_optimizer(type(self.holder)).init_state(self.local, options))
        return state

    @property
    def takes_rows_only(self) -> bool:
        """Whether its optimizer refuses dense gradients, or steps rows as a whole."""
        return type(self.optimizer) in (SparseAdam, RowWiseAdagrad)


def suppose(optimizer: Optimizer, group: Options, rows: Tensor, state: MutableMapping[str, Any]) -> Supposed:
    """Steps copies of rows (K, d) and of their state, in place, without a gradient."""
    options = hyperparameters(group)
    step_tensor(optimizer, options, rows, torch.zeros_like(rows), state)
    return Supposed(optimizer, options)


def sweep(
    optimizer: Optimizer,
    options: Options,
    local: Tensor,
    state: MutableMapping[str, Any],
    parts: Sequence[Rows],
    applied: Sequence[Tensor],
) -> None:
    """Steps all rows of a part (V', d) but those that the step has updated already, in place, and its counters."""
    total = local.shape[0]
    gradient = torch.zeros_like(local)
    for ids, rows in parts:
        gradient.index_copy_(0, ids, rows)
    done = [(ids, local.index_select(0, ids), rows_of_state(state, ids, total)) for ids in applied]
    state.update(step_tensor(optimizer, options, local, gradient, state))
    for ids, values, of_rows in done:
        local.index_copy_(0, ids, values)
        put_rows(state, of_rows, ids, total)
