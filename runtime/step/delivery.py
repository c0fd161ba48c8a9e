"""What a backward found, put where optimizers find it: dense gradients, rows, and what is still on its way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.step.model_state import ModelState
from embrace_fx.vocabulary.graph import Gradient, GradientOfRows, OutputRole, Parameter, PendingGradients, PendingRows


def delivered(roles: Sequence[OutputRole]) -> list[str]:
    """The parameters whose gradients a backward with these outputs delivers."""
    found: dict[str, None] = {}
    for role in roles:
        match role:
            case Gradient(Parameter(name)) | GradientOfRows(name, _):
                found[name] = None
            case PendingGradients(_, names):
                found |= dict.fromkeys(names)
            case PendingRows():
                found |= dict.fromkeys(role.tables)
    return list(found)


def deliver(
    state: ModelState,
    flow: Flow | None,
    synchronised: bool,
    roles: Sequence[OutputRole],
    outputs: Sequence[Any],
    absent: frozenset[str],
    absent_here: frozenset[str],
    tangents: Sequence[Tensor],
) -> None:
    """Puts gradients where optimizers find them, all but the absent ones of parameters that the loss is not of.

    Args:
        absent, absent_here: parameters that no rank's backward reaches, and those that this rank's does not.
        synchronised: whether they are the mean over all ranks; else they add to this rank's own sum (`no_sync`).
        roles, outputs: of the backward.
        tangents: what the backward was given, which may be the user's own tensors.
    """
    rows: dict[str, dict[str, Tensor]] = {}
    given: set[int] = set()
    others = {tangent.untyped_storage().data_ptr() for tangent in tangents}
    for role, value in zip(roles, outputs, strict=True):
        match role:
            case Gradient(Parameter(name)) if name not in (absent if synchronised else absent_here):
                # Two parameters may get the same tensor (the biases of an LSTM), but no two may share a `.grad`; nor
                # may it be one that the backward was given, as of a parameter that is only added.
                shared = id(value) in given or value.untyped_storage().data_ptr() in others
                _deliver_dense(state, name, value.clone() if shared else value, synchronised)
                given.add(id(value))
            case GradientOfRows(table, part) if table not in absent:
                rows.setdefault(table, {})[part] = value
    for table, parts in rows.items():
        state.tables[table].add_gradient(parts["ids"], parts["rows"])
    pending = [role for role in roles if isinstance(role, PendingGradients)]
    for role in pending:
        for name in state.unreduced.intersection(role.parameters):
            state.parameter(name).grad = None  # the bucket took the accumulated part along
            state.unreduced.discard(name)
    if pending:
        assert flow is not None
        flow.buckets.deliver([role.bucket for role in pending], [state.parameter(name) for name in absent])
    for role in roles:
        if isinstance(role, PendingRows):
            assert flow is not None
            exchange = flow.exchanges[role.table]
            exchange.discard() if absent.issuperset(role.tables) else exchange.deliver(absent)


def _deliver_dense(state: ModelState, name: str, gradient: Tensor, synchronised: bool) -> None:
    parameter = state.parameter(name)
    if gradient.stride() != parameter.stride():
        gradient = gradient.contiguous() if parameter.is_contiguous() else gradient.clone()
    if synchronised and name in state.unreduced:
        state.unreduced.discard(name)
        parameter.grad = gradient  # the bucket took the accumulated part along
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    if not synchronised:
        state.unreduced.add(name)
