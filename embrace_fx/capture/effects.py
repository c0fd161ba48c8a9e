"""Repeats a forward's side effects at each call: attributes that it assigns, lists that it appends to, prints and
logs.

Dynamo keeps side effects (`self.h = h.detach()`, a queue, an auxiliary loss stored on a module, `print`) out of the
graph, and generates code that does them from the graph's outputs after the graph has run. The captured graph therefore
returns all values that the code needs, and takes tensors that the forward reads from objects as inputs. Dynamo's code
runs after each call, as under `torch.compile`.

rewrite: self.h = torch.tanh(x @ w + self.h); return self.h.sum()
     ->  graph(w, x, state_0) -> (tanh, sum);   then   model.h = tanh;   return sum
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch._dynamo import variables
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import GlobalSource, TempLocalSource

from embrace_fx.capture.errors import RefusedError
from embrace_fx.capture.guards import OF_PROGRAMS
from embrace_fx.capture.printing import defer_prints
from embrace_fx.capture.read_values import ReadValues

_NO_CONSTANT = object()


@dataclass
class Effects:
    """The side effects of a forward that Dynamo has found while tracing.

    Attributes:
        objects: Dynamo's names of the objects whose attributes or items the forward writes.
        attributes: maps the name of a written attribute, such as `L['self'].count`, to the constant assigned to it, or
            to `_NO_CONSTANT` if the value is not a constant.
        prints: whether the forward prints or logs.
        tensor_hooks: whether the forward registers hooks on tensors.
        globals: names of global variables that the forward assigns.
    """

    objects: list[str] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    prints: bool = False
    tensor_hooks: bool = False
    globals: list[str] = field(default_factory=list)

    def with_model_as_self(self, model_name: str) -> Effects:
        """Returns a copy in which names refer to the model as `L['self']` instead of `model_name`, Dynamo's name for
        it.
        """
        objects = [name.replace(model_name, "L['self']") for name in self.objects]
        attributes = {name.replace(model_name, "L['self']"): value for name, value in self.attributes.items()}
        return replace(self, objects=objects, attributes=attributes)

    def __bool__(self) -> bool:
        return bool(self.objects or self.prints or self.tensor_hooks or self.globals)


@contextlib.contextmanager
def record_effects() -> Iterator[Effects]:
    """Opens a context that yields an empty `Effects`. Tracing a forward in it adds the forward's side effects."""
    effects = Effects()
    suffix = OutputGraph.codegen_suffix

    def recording(self: OutputGraph, tx: Any, *args: Any, **kwargs: Any) -> None:
        """Records the side effects of a trace before Dynamo generates their code. Replaces a method of Dynamo's
        `OutputGraph`.
        """
        _add_effects(effects, self.side_effects, tx)
        suffix(self, tx, *args, **kwargs)

    OutputGraph.codegen_suffix = recording  # type: ignore[method-assign]
    try:
        with defer_prints():
            yield effects
    finally:
        OutputGraph.codegen_suffix = suffix  # type: ignore[method-assign]


def _add_effects(effects: Effects, found: Any, tx: Any) -> None:
    """Adds the side effects that Dynamo has found to `effects`.

    Args:
        found: Dynamo's record of side effects.
        tx: Dynamo's translator of the forward, which records prints.
    """
    for variable in found._get_modified_vars():
        source = variable.source
        if source is None or isinstance(source, TempLocalSource):
            continue  # skip objects that the forward creates, because the object that stores one is listed too
        written = found.store_attr_mutations.get(variable, {})
        if isinstance(variable, variables.NewGlobalVariable) or (isinstance(source, GlobalSource) and written):
            effects.globals += written
        effects.objects.append(source.name)
        for name, value in written.items():
            constant = value.as_python_constant() if value.is_python_constant() else _NO_CONSTANT
            effects.attributes[f"{source.name}.{name}"] = constant
    effects.prints |= bool(tx.debug_locals)
    effects.tensor_hooks |= bool(found.tensor_hooks)


def refuse_effects(effects: Effects, model: nn.Module) -> None:
    """Raises `RefusedError` if the forward assigns a global variable or registers a hook on a tensor, because these
    side effects cannot be repeated at each call.
    """
    kind = type(model).__name__
    if effects.tensor_hooks:
        raise RefusedError(
            f"{kind}: the forward calls register_hook() on a tensor, but a captured graph would not run the hook. "
            "Modify the gradient in a torch.autograd.Function, or after backward()."
        )
    if effects.globals:
        raise RefusedError(
            f"{kind}: the forward assigns the global variable {effects.globals[0]}, which a captured graph cannot do. "
            "Use an attribute of the model instead."
        )


def _toggles_state(effects: Effects, guards: Mapping[str, Any]) -> bool:
    """Returns whether a forward with these side effects assigns a new constant to an attribute that it also reads.

    Args:
        guards: the guarded values, by Dynamo's name.
    """
    set_to = ((name, value) for name, value in effects.attributes.items() if value is not _NO_CONSTANT)
    return any(name in guards and value != guards[name] for name, value in set_to)


@dataclass(frozen=True)
class ReplayedEffects:
    """Repeats a captured forward's side effects at each call, with code that Dynamo has generated.

    Attributes:
        run: Dynamo's code, as a function of the forward's arguments. It repeats the side effects and returns the
            forward's result. Instead of running a graph, it takes the graph's outputs from the top of `outputs`.
        outputs: a stack with the graph's outputs while `run` runs.
        model: the object whose method the forward is, or None if it is a function.
        objects: expressions over `scope` for the objects whose attributes or items are written.
        states: where to read the values of additional inputs of the graph, such as tensors in attributes and numbers.
            Each item is an expression over `scope`, or an index among the flattened arguments.
        scope: the variables that the expressions refer to.
        switches: whether the forward assigns a new constant to an attribute that it also reads.
    """

    run: Callable[..., Any]
    outputs: list[Sequence[Any]]
    model: nn.Module | None
    objects: tuple[str, ...]
    states: tuple[str | int, ...]
    scope: Mapping[str, Any]
    switches: bool

    def __call__(self, outputs: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.outputs.append(outputs)
        try:
            return self.run(*(() if self.model is None else (self.model,)), *args, **kwargs)
        finally:
            self.outputs.pop()

    def read_states(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the current values of the graph's inputs that are not tensors of the batch, such as attributes of the
        model.

        Args:
            leaves: the flattened arguments of the call, which may include some of the values.
        """
        return [leaves[each] if isinstance(each, int) else eval(each, dict(self.scope)) for each in self.states]

    def writes_items_of(self, holder: Mapping[str, Any]) -> bool:
        """Returns whether the forward assigns items of the dict `holder`, such as a module's `_buffers`."""
        return any(
            found is holder for name in self.objects if (found := _evaluated_or_none(name, self.scope)) is not None
        )


def _evaluated_or_none(name: str, scope: Mapping[str, Any]) -> Any:
    """Evaluates the expression `name` with the variables of `scope`. Returns None if it can no longer be evaluated."""
    try:
        return eval(name, dict(scope))
    except Exception:  # an earlier call has replaced an object that the expression reads
        return None


def state_inputs(graph: torch.fx.Graph, model_name: str) -> dict[int, str]:
    """Returns the inputs of Dynamo's graph that are read from attributes of the model or from globals, except
    parameters and buffers. The result maps the position of each input to the expression that reads it.

    Args:
        model_name: Dynamo's name for the model.
    """
    sources = [node._dynamo_source.name for node in graph.nodes if node.op == "placeholder"]
    return {
        position: name.replace(model_name, "L['self']")
        for position, name in enumerate(sources)
        if not ((found := OF_PROGRAMS.fullmatch(name)) and not found[4])
        and (name.startswith("G[") or (model_name in name and name != model_name))
    }


def build_replay(
    out: Any, model: nn.Module, effects: Effects, states: Sequence[str | int], values: ReadValues
) -> ReplayedEffects:
    """Builds the object that repeats a forward's side effects, from code that Dynamo has generated.

    Args:
        out: Dynamo's result of tracing the forward.
        effects: the forward's side effects.
        states: as for `ReplayedEffects`.
        values: the values that Dynamo guards.
    """
    outputs: list[Sequence[Any]] = []
    run = out.forward_callable(
        compiled_fn=lambda *inputs: outputs[-1], extra_globals=out.graph_capture_output.f_globals
    )
    bound: Any = torch._dynamo.convert_frame.get_traced_fn(model)[1]
    switches = _toggles_state(effects, dict(zip(values.names, values.values, strict=True)))
    return ReplayedEffects(run, outputs, bound, tuple(effects.objects), tuple(states), values.scope, switches)
