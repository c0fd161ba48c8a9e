"""The user's optimizer, stepping tables by rows.

The optimizer stays the object the user made: schedulers, param groups and `state_dict` work on it as before. Its class
becomes a subclass of its own class whose `step` also updates the tables that the dense step cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, SparseAdam

from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.optimizer.gradient_watch import GradientWatch
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.row_table import RowTable, fit_state, local_tensor
from embrace_fx.runtime.tables.state_dicts import show_shards
from embrace_fx.vocabulary.exactness import KNOWN_OPTIONS


@dataclass
class DenseTable:
    """A data-parallel table whose optimizer updates rows: its dense gradient is turned into rows at the step.

    Attributes:
        all_rows: a dense use gives every row a gradient; otherwise rows whose gradient is zero stand still.
    """

    table: RowTable
    all_rows: bool


@dataclass
class Stepping:
    """What an optimizer's step does beyond its own class.

    Attributes:
        sharded: tables in column shards.
        dense_tables: data-parallel tables updated by rows.
        communicator: for what the ranks must agree on in a step.
        gradients: what a step checks that it applies what belongs together by, and tells that it does.
        by_rows: the optimizer's class is one of which tables can be updated by rows.
        kind: that class.
        flow: what runs from one step into the next, where there is such.
    """

    sharded: list[RowTable] = field(default_factory=list)
    dense_tables: list[DenseTable] = field(default_factory=list)
    communicator: Communicator | None = None
    gradients: GradientWatch | None = None
    by_rows: bool = True
    kind: type[Optimizer] = Optimizer
    flow: Flow | None = None

    def take(self) -> None:
        """Dense gradients and rows are stepped, or zeroed, together."""
        if self.gradients is not None:
            self.gradients.take()

    def check(self) -> None:
        """Raises where a step would apply gradients that do not belong together."""
        if self.gradients is not None:
            self.gradients.check_written()

    def take_over(self, optimizer: Optimizer) -> bool:
        """Whether the dense part of a step is left to the next forward, which needs its parameters first."""
        if self.flow is None:
            return False
        if self.dense_tables:  # their rows must be cut out of whole gradients, at once
            self.flow.buckets.release(optimizer)
            return False
        return self.flow.buckets.step(optimizer, self.kind)

    def update_rows(self) -> None:
        """Updates the sharded tables, or leaves that to the next forward, which needs their rows first."""
        left: dict[RowExchange, bool] = {}
        for table in self.sharded:
            if self.flow is not None:
                exchange = self.flow.of_table[table.name]
                if exchange not in left:  # the tables of a stack have one
                    left[exchange] = exchange.step()
                if left[exchange]:
                    continue
            table.update()
        for exchange, is_left in left.items():
            if not is_left:
                exchange.note_version()

    def materialise(self) -> None:
        """Makes gradients that are on their way ordinary ones."""
        if self.flow is not None:
            self.flow.settle()
            self.flow.materialise()

    def mean_loss(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure whose loss is the mean over ranks: what LBFGS decides by it must be the same on all of them."""
        communicator = self.communicator

        def mean() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.materialise()
            if loss is None or communicator is None or communicator.world_size == 1:
                return loss
            total = communicator.reduce_scalar(torch.as_tensor(loss).detach().clone(), dist.ReduceOp.SUM)
            return total / communicator.world_size

        return mean


def attach(optimizer: Optimizer, stepping: Stepping) -> type[Optimizer]:
    """Makes `optimizer.step()` and `zero_grad()` cover its tables. Returns the optimizer's own class.

    Raises:
        ValueError: the optimizer belongs to another compiled model.
    """
    if isinstance(optimizer, _RowStepping):
        raise ValueError(
            "expected an optimizer of its own for each compiled model, in compile(), found one that another compiled "
            "model already steps. Make a new optimizer over the model's parameters."
        )
    kind = type(optimizer)
    # A scheduler made before compile has wrapped the old class's `step` into the instance.
    optimizer.__dict__.pop("step", None)
    optimizer.__class__ = type(kind.__name__, (_RowStepping, kind), {"__module__": kind.__module__})
    stepping.by_rows = kind in KNOWN_OPTIONS
    stepping.kind = kind
    optimizer._embrace_stepping = stepping  # type: ignore[attr-defined]
    return kind


class _RowStepping(Optimizer):
    """Mixed in before the optimizer's own class."""

    _embrace_stepping: Stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The class's own step, then the tables' rows. The loss of a closure is the mean over ranks."""
        loss, stepping = None, self._embrace_stepping
        self._hide_rows()
        if closure is not None:
            closure = stepping.mean_loss(closure)
            if not stepping.by_rows:
                self._opt_called = True
                return super().step(closure)  # it may want the loss many times, as LBFGS does
            # Evaluated here and not by the class's step: the gradients it makes must be there before both halves.
            loss = closure()
        if self.__dict__.get("found_inf") is None:
            stepping.check()
        else:
            stepping.materialise()
            if self._overflowed(self.__dict__["found_inf"]):
                return loss
        for table in stepping.sharded:
            table.check()
            _make_state_from_zeros(table)
        stepping.take()
        self._opt_called = True  # what a scheduler looks at to warn of a wrong order of calls
        if not stepping.take_over(self):
            dense = [_take_dense(entry) for entry in stepping.dense_tables]
            super().step()
            for entry, gradient in zip(stepping.dense_tables, dense, strict=True):
                if gradient is not None:
                    entry.table.update()
                    entry.table.parameter.grad = gradient
        stepping.update_rows()
        return loss

    # A GradScaler unscales what it finds in `.grad`; rows are not there. With this attribute it leaves the unscaling to
    # the step, and hands over the scale in `grad_scale` and whether `.grad` overflowed in `found_inf`.
    @property
    def _step_supports_amp_scaling(self) -> bool:
        self._embrace_stepping.materialise()  # the scaler looks for overflows in `.grad` next
        self._show_rows()
        return True

    def _show_rows(self) -> None:
        """Lets a GradScaler find a gradient that is finite where all rows are, on every rank; its scale follows."""
        self._hide_rows()
        stepping = self._embrace_stepping
        if stepping.sharded:
            device = stepping.sharded[0].local.device
            bad = torch.tensor(float(not all(table.is_finite() for table in stepping.sharded)), device=device)
            if stepping.communicator is not None:
                bad = stepping.communicator.reduce_scalar(bad, dist.ReduceOp.MAX)
            shown = nn.Parameter(torch.zeros((), device=device))
            shown.grad = torch.full((), float("inf") if bad.item() else 0.0, device=device)
            self.__dict__["_embrace_shown"] = shown
            self.param_groups[0]["params"].append(shown)

    def _hide_rows(self) -> None:
        shown = self.__dict__.pop("_embrace_shown", None)
        if shown is not None:
            kept = [parameter for parameter in self.param_groups[0]["params"] if parameter is not shown]
            self.param_groups[0]["params"][:] = kept

    def _overflowed(self, found_inf: Tensor | int) -> bool:
        """Unscales all gradients for a GradScaler; whether any gradient, on any rank, is not finite.

        Raises:
            RuntimeError: the gradients in `.grad` have been unscaled without those of the sharded tables.
        """
        tables, scale = self._embrace_stepping.sharded, self.__dict__.get("grad_scale")
        if scale is None and tables:
            raise RuntimeError(
                "expected gradients that are unscaled by the step itself, in optimizer.step(), found that "
                "scaler.unscale_() was called: it does not see the gradients of sharded tables. Leave it out; to clip, "
                "pass max_norm times scaler.get_scale() to the model's own clip_grad_norm_()."
            )
        bad = torch.as_tensor(found_inf).clone()  # of rows too: they were shown; 0 where nothing has a gradient
        if self._embrace_stepping.communicator is not None:
            bad = self._embrace_stepping.communicator.reduce_scalar(bad, dist.ReduceOp.MAX)
        if bad.item() > 0:
            return True
        if scale is not None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.div_(scale)
            for table in tables:
                table.scale_gradient(1.0 / scale)
        self.grad_scale = self.found_inf = None  # done: the class's own step must not look at them again
        return False

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, of whole state or of shards, before the model's first call or after. Collective likewise, and
        where shards are loaded of what is whole here."""
        self._settle()
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in group["params"]:
                fit_state(self.state.get(parameter, {}), parameter, self._group())

    def state_dict(self) -> dict[str, Any]:
        """As torch's, after every update that has been stepped; tables on a grid by columns, which is collective."""
        self._settle()
        found = super().state_dict()
        for key, state in found["state"].items():
            if any(isinstance(value, DTensor) for value in state.values()):
                found["state"][key] = dict(state)  # torch hands out its own
                show_shards(found["state"][key], self._group(), of=f" of parameter {key}")
        return found

    def _group(self) -> dist.ProcessGroup | None:
        communicator = self._embrace_stepping.communicator
        return communicator.group if communicator is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._embrace_stepping.take()
        for table in self._embrace_stepping.sharded:
            table.clear_gradient()
            if self._embrace_stepping.flow is not None:
                self._embrace_stepping.flow.of_table[table.name].discard()

    def _settle(self) -> None:
        if self._embrace_stepping.flow is not None:
            self._embrace_stepping.flow.settle()


def _make_state_from_zeros(table: RowTable) -> None:
    """torch.distributed.checkpoint has an optimizer make its state by a step over zero gradients, which are dense.

    The class's own step takes them as they are, a DTensor of zeros; but for SparseAdam, which takes no dense gradient.
    """
    gradient = table.parameter.grad
    if gradient is not None and isinstance(table.optimizer, SparseAdam) and not local_tensor(gradient).any():
        table.make_state()
        table.parameter.grad = None


def _take_dense(entry: DenseTable) -> Tensor | None:
    """Moves a table's dense gradient out of the class's own step's sight, as rows."""
    parameter = entry.table.parameter
    gradient = parameter.grad
    if gradient is None:
        return None
    if entry.all_rows:
        ids = torch.arange(gradient.shape[0], device=gradient.device)
        entry.table.add_gradient(ids, gradient)
    else:
        ids = gradient.ne(0).any(dim=1).nonzero().view(-1)
        entry.table.add_gradient(ids, gradient.index_select(0, ids))
    parameter.grad = None
    return gradient


def replace_parameter(optimizers: Sequence[Optimizer], old: nn.Parameter, new: nn.Parameter) -> None:
    """Puts `new` where any optimizer holds `old`; state made before (a resumed run) moves along."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # In place: LBFGS keeps the list itself.
            group["params"][:] = [new if parameter is old else parameter for parameter in group["params"]]
        if old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)
