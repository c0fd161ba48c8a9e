"""Captures a model with one batch as a `TrainingGraph` of ATen ops. Only this package uses torch's private capture API.

If the forward cannot be captured, `CaptureError` names the user's line.

Contract
    The model does not run: tensors are fake, so a model on the meta device or larger than memory can be captured.
    The graph is functional: state that the forward mutates (BatchNorm's statistics) becomes `Mutation` outputs.
    RNNs stay whole (`KeepRnnWhole`), tables keep their own ops (`embedding`, `_embedding_bag`).
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from embrace_fx.capture.arguments import (
    check_arguments,
    find_shared_memory,
    flatten_arguments,
    owner_of,
    same_constant,
)
from embrace_fx.capture.effects import ReplayedEffects
from embrace_fx.capture.errors import (
    CaptureError,
    RefusedError,
    explain_failed_capture,
    line_of_branch,
    raised_by_forward,
)
from embrace_fx.capture.guards import Conditions, traced_function
from embrace_fx.capture.kept_by_torch import forget_captures
from embrace_fx.capture.numbers import Symbol, fixed_by_guards
from embrace_fx.capture.read_values import Changed
from embrace_fx.capture.roles import assign_roles
from embrace_fx.capture.routes import UNREAD, Traced, copies_to_mark, quiet_dynamo, trace
from embrace_fx.vocabulary.graph import BatchInput, Mutation, TrainingGraph
from embrace_fx.vocabulary.ops import argument


@dataclass(frozen=True)
class Captured:
    """A captured graph, and the conditions under which it is valid for a call of the model.

    Attributes:
        graph: forward and backward, or only the forward if captured with `train=False`.
        result_spec: the tree structure of the model's results.
        result_constants: maps the index of a flattened result to its value, for results that are not tensors and are
            the same for every batch.
        route: "graph" if the forward is captured, "eager" if the graph only exchanges gradients.
        guard: torch's shape guards, compiled to a Python expression over the batch's tensors. None if all shapes are
            valid.
        guarded: the indices, among the graph's inputs, of the tensors and numbers that `guard` calls t0, t1, and so on.
        fakes: the traced values of the guarded inputs, or () if nothing is guarded.
        conditions: values of the model, of globals and of closures that must not change while the graph is valid.
        replay: repeats the forward's side effects, and builds its results from the graph's outputs. None if the forward
            has no side effects, and the graph reads no values from objects.
        written: the indices, among the flattened arguments, of the tensors that the forward modifies in place.
        constants: maps the index of a flattened argument to its value, for arguments that the forward reads and that
            are not tensors.
        names: maps the index of a flattened argument to the expression that reads it, such as `L['weight']`.
        owners: maps the index of a constant that has no expression to the argument that contains it.
        deciding: names of numbers that cannot become inputs of the graph, because their value decides what is computed.
    """

    graph: TrainingGraph
    result_spec: pytree.TreeSpec
    result_constants: Mapping[int, Any]
    route: str
    guard: types.CodeType | None
    guarded: tuple[int, ...]
    fakes: tuple[Tensor | Symbol, ...]
    conditions: Conditions
    replay: ReplayedEffects | None = None
    written: tuple[int, ...] = ()
    constants: Mapping[int, Any] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    owners: Mapping[int, str] = field(default_factory=dict)
    deciding: frozenset[str] = frozenset()

    def with_new_guards(self) -> Captured:
        """Returns a copy whose `guard` also contains shape guards that torch has added since the capture, for example
        while the graph was compiled.
        """
        return replace(self, guard=_compile_guard(self.fakes)) if self.fakes else self

    def changed_constants(self, leaves: Sequence[Any]) -> list[Changed]:
        """Returns the constants of the graph whose values have changed since the capture. The graph is then invalid for
        the call. Returns an empty list if the call differs only in shapes.

        Args:
            leaves: the flattened arguments of the call.
        """
        changed = [
            Changed(self.names.get(k, ""), value, leaves[k], self.owners.get(k, ""))
            for k, value in self.constants.items()
            if not same_constant(leaves[k], value)
        ]
        return changed + self.conditions.values.changed()

    @property
    def toggles_state(self) -> bool:
        """Whether the forward assigns a new constant to an attribute that it also reads, so that the next call needs
        another graph.
        """
        return self.replay is not None and bool(self.replay.switches)

    def inputs(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Returns the graph's inputs for a call: the flattened arguments, then the values that the graph reads from
        attributes of objects.

        Args:
            leaves: the flattened arguments of the call.
        """
        return leaves if self.replay is None else [*leaves, *self.replay.read_states(leaves)]

    def build_result(self, results: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Builds the forward's result from the graph's outputs, and repeats the forward's side effects, such as
        prints.

        Args:
            results: the graph's outputs.
            args, kwargs: the arguments of the call.
        """
        own = pytree.tree_unflatten(results, self.result_spec)
        return own if self.replay is None else self.replay(own, args, kwargs)

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Returns whether the graph is valid for a call. The caller has already checked the types and dtypes of the
        arguments.

        Args:
            leaves: the flattened arguments of the call.
        """
        for k, value in self.constants.items():  # a loop, because this runs at every call and a generator is slower
            if not same_constant(leaves[k], value):
                return False
        if not self.conditions.are_met():
            return False
        if self.written and find_shared_memory(self.written, leaves):
            return False
        if self.guard is None:
            return True
        inputs = self.inputs(leaves)
        values = {f"t{k}": inputs[index] for k, index in enumerate(self.guarded)}
        return bool(eval(self.guard, SYMPY_INTERP, {"L": values}))


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool,
    dynamic: frozenset[tuple[int, int]] = frozenset(),
    values: Collection[str] = (),
) -> Captured:
    """Captures the model's forward as a graph of ATen ops.

    Args:
        args, kwargs: one batch, exactly as the model is called with it.
        train: whether to capture the backward, too.
        dynamic: (index among the flattened arguments, dimension) pairs whose size may vary from batch to batch.
        values: expressions, such as `L['self'].scale`, that read numbers or tensors from the model or from arguments.
            Their values become inputs of the graph. All other values become constants.

    Raises:
        CaptureError: the forward cannot be captured; the message names the user's line.
    """
    if train:
        _refuse_backward_hooks(model)
    check_arguments(flatten_arguments(args, kwargs)[0], type(model).__name__)
    forget_captures()
    given = pytree.tree_leaves((args, kwargs))
    own_args, own_kwargs = copies_to_mark(args, kwargs, dynamic)
    try:
        with torch.set_grad_enabled(train), quiet_dynamo():
            leaves = pytree.tree_leaves((own_args, own_kwargs))
            captured = _build_captured(model, trace(model, own_args, own_kwargs, values=values), leaves)
            # An argument that is returned counts as read.
            if any(value is UNREAD for value in captured.result_constants.values()):
                traced = trace(model, own_args, own_kwargs, values=values, reads_all=True)
                captured = _build_captured(model, traced, leaves)
        _refuse_shared_memory(captured.written, given, type(model).__name__)
    except RefusedError:
        raise
    except Exception as error:
        raise explain_failed_capture(model, error, raised_by_forward(model, args, kwargs, error)) from error
    unnamed = captured.constants.keys() - captured.names.keys()
    return replace(captured, owners={k: owner_of(k, traced_function(model), args, kwargs) for k in unnamed})


def _refuse_backward_hooks(model: nn.Module) -> None:
    """Raises `RefusedError` if a module, or all modules, have backward hooks, which a captured graph would not run."""
    everywhere = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    for name, module in model.named_modules():
        if everywhere or module._backward_hooks or module._backward_pre_hooks:
            hooked = "every module" if everywhere else name or "the model"
            raise RefusedError(
                f"{type(model).__name__}: {hooked} has a backward hook, which would run only once, during "
                "the capture. Remove the hook, and read gradients after backward(). Or register the hook on the "
                "compiled model, where it runs in every backward."
            )


def _build_captured(model: nn.Module, traced: Traced, leaves: Sequence[Any]) -> Captured:
    """Builds a `Captured` from a trace. Assigns roles to the graph's inputs and outputs, and compiles the guards.

    Args:
        traced: the result of tracing the model.
        leaves: the flattened arguments of the batch.
    """
    of_arguments = len(leaves)
    if traced.replay is not None:
        leaves = [*leaves, *traced.replay.read_states(leaves)]
    joint = assign_roles(traced.joint, model, traced.constants)
    _refuse_fake_constants(joint.module)
    guarded, fakes = _guarded_values(traced.fake_mode, joint.batch, leaves)
    guard = _compile_guard(fakes) if fakes else None
    graph = TrainingGraph(joint.module)
    mutated = [role.of for _, role in graph.outputs() if isinstance(role, Mutation)]
    return Captured(
        graph,
        traced.out_spec,
        joint.constants,
        "graph",
        guard,
        guarded,
        fakes,
        traced.conditions,
        traced.replay,
        written=tuple(of.index for of in mutated if isinstance(of, BatchInput) and of.index < of_arguments),
        constants=traced.constants,
        names=traced.names,
        deciding=fixed_by_guards(traced.symbols) | _padding_numbers(joint.module, traced.symbols),
    )


def _padding_numbers(module: fx.GraphModule, symbols: Mapping[str, Symbol]) -> frozenset[str]:
    """Returns the names of numbers that are the padding row of a lookup. They must be constants, because passes read
    them.
    """
    calls = [node for node in module.graph.nodes if isinstance(node.target, OpOverload)]
    lookups = [node for node in calls if any(each.name == "padding_idx" for each in node.target._schema.arguments)]
    rows = [argument(node, "padding_idx") for node in lookups]
    read = {symbol for row in rows if isinstance(row, fx.Node) for symbol in row.meta["val"].node._expr.free_symbols}
    return frozenset(name for name, symbol in symbols.items() if read & symbol.node._expr.free_symbols)


def _refuse_shared_memory(written: Sequence[int], leaves: Sequence[Any], kind: str) -> None:
    """Raises `RefusedError` if an argument that the forward modifies in place shares memory with another argument.

    Args:
        written: indices of the flattened arguments that the forward modifies.
        leaves: the flattened arguments.
        kind: the model's class name, for the message.
    """
    if (found := find_shared_memory(written, leaves)) is not None:
        one, other = found
        raise RefusedError(
            f"{kind}: the forward modifies the argument with index {one} in place, and the argument with index {other} "
            "shares its memory (indices of all arguments, after containers are flattened). Pass a clone() of one of "
            "the two."
        )


def _refuse_fake_constants(module: fx.GraphModule) -> None:
    """Raises `CaptureError` if the graph contains a fake tensor as a constant. This happens if the forward reads a
    parameter that does not belong to the model.
    """
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, str(node.target), None), FakeTensor):
            raise CaptureError(
                "the forward uses parameters that do not belong to the model, for example through a closure. Assign "
                "these parameters, or their module, to attributes of the model"
            )


def _guarded_values(
    fake_mode: Any, placeholders: Mapping[int, fx.Node], leaves: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[Tensor | Symbol, ...]]:
    """Returns the indices of the graph inputs to which shape guards may refer, and the traced values of these inputs.

    Args:
        fake_mode: torch's fake tensor mode of the trace, or None if nothing is fake.
        placeholders: maps the index of a graph input to its placeholder.
        leaves: the values of the graph's inputs: the flattened arguments, and values read from objects.
    """
    if fake_mode is None or fake_mode.shape_env is None:
        return (), ()
    indices = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) or i in placeholders)
    fakes = tuple(
        placeholders[i].meta["val"] if i in placeholders else fake_mode.from_tensor(leaves[i], static_shapes=True)
        for i in indices
    )
    return indices, fakes


def _compile_guard(fakes: Sequence[Any]) -> types.CodeType | None:
    """Compiles torch's shape guards to an expression over the batch's tensors. Returns None if there are no guards.

    Args:
        fakes: the traced values of the guarded inputs.

    Raises:
        CaptureError: the forward branches on the value of a tensor.
    """
    first = fakes[0]
    sizes: Any = first.fake_mode.shape_env if isinstance(first, FakeTensor) else first.node.shape_env
    try:
        text = sizes.produce_guards_expression(fakes, ignore_static=False)
    except IndexError as error:
        # torch expects every symbol to be a tensor's size, but this one is a number that the forward has read.
        where = line_of_branch([str(guard.sloc) for guard in sizes.guards])
        raise CaptureError(
            "the forward branches on the value of a tensor (use torch.where() instead)", where=where
        ) from error
    # Drop guards on storage offsets, which the graph does not read.
    text = re.sub(r"L\['t\d+'\]\.storage_offset\(\) == 0", "True", text or "")
    return compile(text, "<shape guards>", "eval") if text else None
