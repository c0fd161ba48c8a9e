"""Makes a function of a phase: from the batch, the model's state, and values that earlier phases saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, fx

from embrace_fx.runtime.lower.lower import Call, Phase, lower_phase, phase_source
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.graph import (
    BatchInput,
    Buffer,
    OutputRole,
    Parameter,
    Saved,
    Shard,
    Tangent,
    Values,
    inputs_of,
    outputs_of,
)

if TYPE_CHECKING:  # importing Inductor takes seconds, so only its users import it
    from embrace_fx.runtime.lower.inductor import RegionCompiler

Result = TypeVar("Result")

_HELD, _SHARD, _BATCH, _SAVED, _TANGENT = range(5)


@dataclass(frozen=True)
class Runnable:
    """A phase of a program as a function."""

    run: Phase
    sources: tuple[tuple[int, Any], ...]  # for each argument, the kind of its source and its key there
    roles: tuple[OutputRole, ...]  # of the outputs
    last: bool  # whether to remove each saved value when it is read, so that it is freed after its last use

    def __call__(self, leaves: Sequence[Any], values: Values, tangents: Mapping[int, Tensor]) -> tuple[Any, ...]:
        arguments: list[Any] = []
        for kind, key in self.sources:
            if kind == _SAVED:
                arguments.append(values.pop(key) if self.last else values[key])
            elif kind == _HELD:
                owner, name = key
                arguments.append(owner[name])
            elif kind == _SHARD:
                arguments.append(key())
            elif kind == _BATCH:
                arguments.append(leaves[key])
            else:
                arguments.append(tangents[key])
        return self.run(arguments)

    def source(self) -> str:
        """Returns the Python code of the function."""
        return phase_source(self.run)

    def run_and_save(self, leaves: Sequence[Any], values: Values) -> Values:
        """Runs the phase on a flattened batch, stores the values that it saves in `values`, and returns `values`."""
        store_saved(self.roles, self(leaves, values, {}), values)
        return values


def make_runnable(
    module: fx.GraphModule,
    state: ModelState,
    call: Call = lambda node: None,
    regions: RegionCompiler | None = None,
    *,
    last: bool = False,
) -> Runnable:
    """Makes a function of a phase's graph (`module`).

    Args:
        call: returns the runtime function that runs a node, or None if the node runs a kernel or one of torch's ops.
        regions: compiles the compute between two communications, or None to call each op separately.
        last: whether no later phase reads the values that this phase reads, so that they can be freed.
    """
    sources: list[tuple[int, Any]] = []
    for _, role in inputs_of(module):
        match role:
            case Parameter(name):
                sources.append((_HELD, state.place_of_parameter(name)))
            case Shard(name):
                sources.append((_SHARD, state.shard_reader(name)))
            case Buffer(name):
                sources.append((_HELD, state.place_of_buffer(name)))
            case BatchInput(index):
                sources.append((_BATCH, index))
            case Tangent(index):
                sources.append((_TANGENT, index))
            case Saved(name):
                sources.append((_SAVED, name))
    run = lower_phase(module, call, regions)
    return Runnable(run, tuple(sources), tuple(role for _, role in outputs_of(module)), last)


def make_reader(module: fx.GraphModule, state: ModelState) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns a function of a flattened batch that computes the outputs of a graph (`module`) without collectives."""
    run = make_runnable(module, state)
    return lambda leaves: run(leaves, {}, {})


def store_saved(roles: Sequence[OutputRole], outputs: Sequence[Any], values: Values) -> None:
    """Stores in `values`, by name, the outputs of a phase that later phases read."""
    values |= {role.name: value for role, value in zip(roles, outputs, strict=True) if isinstance(role, Saved)}


def call_without_autograd(call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Calls a function with autograd and autocast turned off, because the graphs of a program already contain gradients
    and casts as nodes.
    """
    had_gradients = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # `torch.no_grad` would make eight Python calls
    try:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return call(*arguments, **options)
        return call(*arguments, **options)
    finally:
        torch._C._set_grad_enabled(had_gradients)
