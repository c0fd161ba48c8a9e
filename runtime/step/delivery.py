"""Stores the results of a backward where optimizers find them: dense gradients, rows, and gradients still in flight.

Gradients have the layouts that autograd makes; an optimizer's class may take others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from embrace_fx.runtime.flow.comm_pipeline import CommPipeline
from embrace_fx.runtime.step.gradient_hooks import run_hooks_on_grad, run_tensor_hooks
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.own_step import accepts_sparse
from embrace_fx.runtime.tables.pending_parameters import is_gradient_referenced
from embrace_fx.vocabulary.graph import (
    Gradient,
    GradientOfRows,
    GradientOfShard,
    OutputRole,
    Parameter,
    PendingGradients,
    PendingRows,
)


def delivered(roles: Sequence[OutputRole]) -> set[str]:
    """Returns the names of the parameters that get a gradient from a backward whose outputs have these roles."""
    found = set[str]()
    for role in roles:
        match role:
            case Gradient(Parameter(name)) | GradientOfShard(name):
                found.add(name)
            case PendingGradients():
                found.update(role.parameters)
            case GradientOfRows() | PendingRows():
                found.update(role.tables)
    return found


class _SortedOutputs:
    """The outputs of a backward, sorted by how their gradients are stored."""

    def __init__(self, roles: Sequence[OutputRole]) -> None:
        self.roles = roles  # keeps the roles alive, because the cache identifies them by `id()`
        self.dense: dict[str, int] = {}  # name of a parameter -> index of its gradient among the outputs
        self.of_shards: dict[str, int] = {}  # the same for tables
        # Name of a table -> (its parameters, index of the ids among the outputs, index of the rows).
        self.of_rows: dict[str, tuple[Sequence[str], int, int]] = {}
        self.pending: list[PendingGradients] = []
        self.pending_rows: list[tuple[int, PendingRows]] = []
        parts = {(role.table, role.part): k for k, role in enumerate(roles) if isinstance(role, GradientOfRows)}
        for place, role in enumerate(roles):
            match role:
                case Gradient(Parameter(name)):
                    self.dense[name] = place
                case GradientOfShard(table):
                    self.of_shards[table] = place
                case GradientOfRows(table, "rows"):
                    self.of_rows[table] = role.tables, parts[table, "ids"], place
                case PendingGradients():
                    self.pending.append(role)
                case PendingRows():
                    self.pending_rows.append((place, role))


@dataclass(frozen=True)
class Delivery:
    """Stores the gradients that one program's backwards compute: dense gradients in `.grad`, rows in tables, and
    gradients that are still being exchanged as futures.
    """

    state: ModelState
    flow: CommPipeline
    synchronised: bool  # whether gradients are the mean over ranks, rather than this rank's own under `no_sync`
    own: bool  # whether dense gradients are this rank's own, on which the parameters' hooks have not run yet
    _sorted: dict[int, _SortedOutputs] = field(default_factory=dict)  # id of the roles -> the sorted outputs

    def __call__(
        self,
        roles: Sequence[OutputRole],
        outputs: Sequence[Any],
        absent: frozenset[str],
        absent_here: frozenset[str],
        tangents: Sequence[Tensor],
    ) -> None:
        """Delivers all gradients except those of parameters on which the loss does not depend.

        Args:
            absent, absent_here: names of parameters that no rank's backward reaches, and those that this rank's does
                not.
            tangents: the gradients of the model's results, which may be the user's own tensors. No `.grad` may share
                their memory.
        """
        state, given = self.state, set[int]()
        sorted_ = self._sorted.get(id(roles))
        if sorted_ is None:
            sorted_ = self._sorted[id(roles)] = _SortedOutputs(roles)
        ignored, unreached = state.ignored, absent if self.synchronised else absent_here
        others = {tangent.untyped_storage().data_ptr() for tangent in tangents}
        is_plain = self.synchronised and not state.unreduced and not (self.own and state.hooked)
        for (name, place), parameter in zip(sorted_.dense.items(), state.parameters(sorted_.dense), strict=True):
            value, local = outputs[place], name in ignored  # each rank keeps its own gradient of an ignored parameter
            if name in (absent_here if local else unreached):
                continue
            # Copy a tensor that is the gradient of two parameters (such as an LSTM's biases), or that was passed to the
            # backward, because no other tensor may share memory with a `.grad`.
            shares = others and not value.is_sparse and value.untyped_storage().data_ptr() in others
            if id(value) in given or shares:
                value = value.clone()
            given.add(id(value))
            fits = value.is_sparse or value.stride() == parameter.stride()
            if is_plain and not local and parameter.grad is None and fits:
                parameter.grad = value
            else:
                _deliver_one(state, name, value, self.synchronised or local, self.own or local)
        self._deliver_tables(sorted_, outputs, absent)

    def _deliver_tables(self, sorted_: _SortedOutputs, outputs: Sequence[Any], absent: frozenset[str]) -> None:
        """Stores the gradients of tables, and those in `.grad` that are still being exchanged."""
        for name, place in sorted_.of_shards.items():
            self.state.tables[name].add_dense_gradient(outputs[place], absent, unreduced=not self.synchronised)
        for table, (tables, ids, rows) in sorted_.of_rows.items():
            if not absent.issuperset(tables):
                found = self.state.table(table)
                found.add_gradient(outputs[ids], outputs[rows], absent, unreduced=not self.synchronised)
        self._deliver_buckets(sorted_.pending, absent)
        for place, pending in sorted_.pending_rows:
            if not absent.issuperset(pending.tables):
                outputs[place].deliver(absent, unreduced=not self.synchronised)

    def _deliver_buckets(self, pending: Sequence[PendingGradients], absent: frozenset[str]) -> None:
        """Stores the gradients of buckets in `.grad` while the buckets are still being reduced."""
        if not pending:
            return
        kept: dict[nn.Parameter, Tensor] = {}
        for role in pending:
            for name in self.state.unreduced.intersection(role.parameters):
                parameter = self.state.parameter(name)
                if parameter.grad is not None and is_gradient_referenced(parameter):
                    kept[parameter] = parameter.grad
                parameter.grad = None  # the bucket already includes the gradient accumulated there
                self.state.unreduced.discard(name)
        self.flow.buckets.deliver([role.bucket for role in pending], [self.state.parameter(name) for name in absent])
        for parameter, gradient in kept.items():
            if parameter.grad is not None:
                parameter.grad = gradient.copy_(parameter.grad)


def _deliver_one(state: ModelState, name: str, gradient: Tensor, synchronised: bool, own: bool) -> None:
    """Runs a parameter's hooks on a gradient, and stores the gradient in `.grad` or adds it there.

    Args:
        synchronised: whether the gradient is final: the mean over ranks, or that of a parameter without a mean.
        own: whether the gradient is this rank's own. Only then do the parameter's hooks run.
    """
    parameter = state.parameter(name)
    hooks = own and name in state.hooked
    if hooks:
        gradient = run_tensor_hooks(parameter, gradient)
    if not gradient.is_sparse and gradient.stride() != parameter.stride():
        gradient = gradient.contiguous() if parameter.is_contiguous() else gradient.clone()
    if synchronised and name in state.unreduced:
        state.unreduced.discard(name)
        # The reduced gradient includes what was accumulated in `.grad`, so overwrite that.
        parameter.grad = gradient if parameter.grad is None else parameter.grad.copy_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    elif parameter.grad.is_sparse and not gradient.is_sparse:
        parameter.grad = gradient.add(parameter.grad)
    else:
        parameter.grad.add_(gradient)
    if hooks:
        run_hooks_on_grad(parameter)
    if not synchronised:
        state.unreduced.add(name)


def in_supported_layouts(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields (parameter, converted gradient) where a gradient is sparse or dense but the optimizer wants the other."""
    takes_any, wants = accepts_sparse(optimizer), type(optimizer) is SparseAdam
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse and not takes_any:
                yield parameter, gradient.to_dense()
            elif gradient is not None and gradient.layout == torch.strided and wants:
                yield parameter, gradient.to_sparse(1)
