"""Traces a model with a batch of fake tensors to one ATen graph of forward and backward.

Dynamo traces the forward's bytecode to a torch-level graph, which AOTAutograd traces with its backward to one ATen
graph. Tied parameters stay tied.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import fullgraph_capture
from torch._dynamo.functional_export import create_fx_graph_from_captured_output
from torch._dynamo.utils import dynamo_timed
from torch._export.utils import _compiling_state_context
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree

from embrace_fx.capture.arguments import argument_names, check_read_arguments, constants_read
from embrace_fx.capture.checkpointing import mark_backward, record_checkpoint_regions
from embrace_fx.capture.collectives import check_collectives, refuse_collectives
from embrace_fx.capture.effects import (
    Effects,
    ReplayedEffects,
    build_replay,
    record_effects,
    refuse_effects,
    state_inputs,
)
from embrace_fx.capture.errors import CaptureError
from embrace_fx.capture.guards import (
    Conditions,
    collect_guards,
    name_of_model,
    to_dynamo_name,
    traced_function,
)
from embrace_fx.capture.kept_by_torch import capture_metrics
from embrace_fx.capture.model_forms import STATES, TreeResults
from embrace_fx.capture.numbers import Symbol, number_inputs, numbers_as_inputs, symbols_of
from embrace_fx.capture.read_values import NumbersRead, ReadValues, tensors_read_as_numbers
from embrace_fx.capture.rnn_mode import CELLS, KeepRnnWhole, rnn_as_ops
from embrace_fx.vocabulary.graph import SPARSE_LOOKUP, source_of


@dataclass(frozen=True)
class Traced:
    """A traced model: its graph, and what is needed to call it.

    Attributes:
        joint: AOTAutograd's graph of forward and backward, or only of the forward. Inputs and outputs have
            descriptions. Constants of the batch have not yet been removed from the inputs.
        out_spec: the tree structure of the model's results.
        fake_mode: torch's fake tensor mode of the trace, or None.
        conditions: the conditions under which the graph stays valid.
        replay: repeats the forward's side effects from the graph's results, or None if there are none.
        constants: maps the index of a flattened argument to its value, for arguments that the forward reads and that
            are not tensors.
        names: maps the index of a flattened argument to Dynamo's name for it.
        symbols: the symbols of the numbers that are inputs of the graph, by name.
    """

    joint: fx.GraphModule
    out_spec: pytree.TreeSpec
    fake_mode: Any
    conditions: Conditions
    replay: ReplayedEffects | None
    constants: Mapping[int, Any]
    names: Mapping[int, str]
    symbols: Mapping[str, Symbol]


def copies_to_mark(
    args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: frozenset[tuple[int, int]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with uninitialized copies in place of all tensors. Dynamic dimensions of the
    copies are marked for Dynamo.

    Each copy begins at the start of its own storage, because batches sliced from one long tensor have varying offsets.

    Args:
        args, kwargs: the arguments of the call.
        dynamic: (index among the flattened arguments, dimension) pairs whose size may vary.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        own = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        for dim in range(own.dim()):
            if (index, dim) in dynamic:
                torch._dynamo.maybe_mark_dynamic(own, dim)
        leaves[index] = own.requires_grad_(leaf.requires_grad)
    copies: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, spec)
    return copies


@contextlib.contextmanager
def quiet_dynamo() -> Iterator[None]:
    """Opens a context with Dynamo's options for a capture, and without its warnings.

    Only marked sizes vary. Other models that Dynamo has traced do not change this.
    """
    options = {
        "allow_rnn": True,
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
    }
    with torch._dynamo.config.patch(options), warnings.catch_warnings():
        # If warnings are errors, torch's own warnings would make Dynamo fail. This warning is about autograd functions:
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        warnings.filterwarnings("ignore", "Guards may run slower", RuntimeWarning)  # Python 3.13.0 raises this warning
        # This one is about cached functions, which Dynamo traces into:
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`", UserWarning)
        yield


_SPARSE = {torch.nn.functional.embedding: 6, torch.nn.functional.embedding_bag: 7}
"""Lookup function -> the position of its argument `sparse`."""


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `torch.nn.functional.linear` as a single product that includes the bias, for inputs of any memory
    format.

    For inputs that are not contiguous, such as the output of an RNN with `batch_first`, torch would add the bias in a
    separate op.
    """
    copies = bias is not None and input.dim() == 3
    return torch.nn.functional.linear(input.contiguous() if copies else input, weight, bias)


def _replace_untraceable_calls(read: fx.GraphModule) -> None:
    """Replaces some calls in Dynamo's graph, and in nested graphs, by calls that can be traced to ATen. These are calls
    of RNNs, of `linear`, and lookups with sparse gradients.

    ATen graphs do not support the layout of sparse gradients. `meta["custom"]` marks the lookups that requested one.
    """
    for module in [each for each in read.modules() if isinstance(each, fx.GraphModule)]:
        kinds: tuple[Any, ...] = (*CELLS, *_SPARSE, torch.nn.functional.linear)
        for node in [node for kind in kinds for node in module.graph.find_nodes(op="call_function", target=kind)]:
            if (cell := CELLS.get(node.target)) is not None:
                node.target, node.args = rnn_as_ops, (cell, *node.args)
                continue
            if node.target is torch.nn.functional.linear:
                node.target = _linear
                continue
            place = _SPARSE[node.target]
            if node.args[place] if place < len(node.args) else node.kwargs.get("sparse", False):
                node.meta["custom"] = {**(node.meta.get("custom") or {}), SPARSE_LOOKUP: True}
            if place < len(node.args):
                node.update_arg(place, False)
            else:
                node.update_kwarg("sparse", False)


UNREAD = "an argument that the forward does not read"
"""During tracing, this text replaces each argument that the forward does not read."""


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    values: Collection[str] = (),
    reads_all: bool = False,
) -> Traced:
    """Traces a model's forward and backward, or only the forward if gradients are disabled.

    Args:
        args, kwargs: one batch, as the model is called with it.
        values: expressions, such as `L['self'].scale`, that read numbers or tensors from the model or from arguments.
            Their values become inputs of the graph.
        reads_all: whether to treat all arguments as read, even those that Dynamo has not guarded.
    """
    itself = name_of_model(model)
    names = {to_dynamo_name(name, itself): name for name in values}
    with numbers_as_inputs(names):
        read = _trace_with_dynamo(model, args, kwargs, reads_all)
    symbols = symbols_of(read.out.graph_capture_output.output_graph.shape_env, names)
    _replace_untraceable_calls(read.gm)
    context = read.gm.meta.get("tracing_context") or TracingContext(read.gm.meta["fake_mode"])
    # Drop these fake tensors, which only the construction of guards needs. They belong to a reference cycle through C++
    # that Python cannot collect, so the whole capture would stay in memory.
    sizes: Any = context.fake_mode and context.fake_mode.shape_env
    if sizes is not None:
        sizes.tracked_fakes = []
    conditions = replace(
        read.conditions, numbers=_tensors_read_as_numbers(read.gm.graph, itself, read.conditions.values)
    )
    module, keywords = TreeResults(read.gm), read.kwargs
    replay: ReplayedEffects | None = None
    if read.effects or values:
        module, given, replay = _make_states_inputs(model, read, symbols, itself)
        keywords, conditions = {**read.kwargs, STATES: given}, conditions.without(replay.states)
    joint, out_spec = _trace_joint(module, read.args, keywords, context)
    return Traced(
        joint,
        out_spec,
        context.fake_mode,
        conditions,
        replay,
        {k: value for k, value in read.constants.items() if read.names.get(k) not in symbols},
        read.names,
        {names[name]: symbol for name, symbol in symbols.items()},
    )


def _without_unread(
    args: tuple[Any, ...], kwargs: dict[str, Any], read: Mapping[int, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with `UNREAD` in place of each one that is not a tensor and that the forward does not read.

    Args:
        read: maps the index of a flattened argument to its value, for arguments that the forward reads and that are not
            tensors.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kept = [leaf if isinstance(leaf, Tensor) or k in read else UNREAD for k, leaf in enumerate(leaves)]
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(kept, spec)
    return found


def _make_states_inputs(
    model: nn.Module, read: _Read, symbols: Mapping[str, Symbol], model_name: str
) -> tuple[TreeResults, list[Any], ReplayedEffects]:
    """Adds inputs to the graph for values that the forward reads from attributes or globals, and for numbers that may
    vary.

    Args:
        read: the forward, traced by Dynamo.
        symbols: the symbols of the numbers that may vary, by Dynamo's name.
        model_name: Dynamo's name for the model.

    Returns:
        The module to trace, the values of the additional inputs, and the object that repeats the forward's side
        effects.
    """
    graph, effects = read.gm.graph, read.effects.with_model_as_self(model_name)
    refuse_effects(effects, model)
    places = number_inputs(graph, symbols)
    states = {k: name for k, name in state_inputs(graph, model_name).items() if k not in places.values()}
    anew = _where_read(read, symbols, model_name)
    replay = build_replay(read.out, model, effects, [*states.values(), *anew], read.conditions.values)
    given = replay.read_states(pytree.tree_leaves((read.args, read.kwargs)))[: len(states)]
    module = TreeResults(read.gm, (*states, *(places.get(name) for name in symbols)))
    return module, [*given, *symbols.values()], replay


def _where_read(read: _Read, symbols: Mapping[str, Symbol], model_name: str) -> list[str | int]:
    """Returns, for each number that is an input of the graph, where to read it at a call: an index among the flattened
    arguments, or an expression.

    Args:
        read: the forward, traced by Dynamo.
        symbols: the symbols of the numbers that are inputs, by Dynamo's name.
        model_name: Dynamo's name for the model.
    """
    of_arguments = {name: k for k, name in read.names.items()}
    return [of_arguments.get(name, read.conditions.to_scope_name(name, model_name)) for name in symbols]


def _tensors_read_as_numbers(graph: fx.Graph, model_name: str, values: ReadValues) -> NumbersRead:
    """Returns the tensors in attributes and globals from which Dynamo's graph reads Python numbers.

    Args:
        model_name: Dynamo's name for the model.
        values: the values that Dynamo guards.
    """
    inputs, found = graph.find_nodes(op="placeholder"), dict(zip(values.names, values.values, strict=True))
    tensors = {inputs[k]: found.get(name) for k, name in state_inputs(graph, model_name).items()}
    return tensors_read_as_numbers(graph, {node: each for node, each in tensors.items() if isinstance(each, Tensor)})


@dataclass
class _Read:
    """A forward traced by Dynamo, before it is traced to ATen.

    Attributes:
        gm: Dynamo's graph.
        out: Dynamo's result of tracing the forward.
        conditions: the conditions under which the graph stays valid.
        effects: the forward's side effects.
        args, kwargs: the batch, with `UNREAD` for arguments that the forward does not read.
        constants: maps the index of a flattened argument to its value, for arguments that the forward reads and that
            are not tensors.
        names: maps the index of a flattened argument to Dynamo's name for it.
    """

    gm: fx.GraphModule
    out: Any
    conditions: Conditions
    effects: Effects
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    constants: Mapping[int, Any]
    names: Mapping[int, str]


def _trace_with_dynamo(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reads_all: bool) -> _Read:
    """Traces a forward with Dynamo.

    Dynamo runs every call on fake tensors to find shapes, and unrolling an RNN would fix its number of steps.
    `KeepRnnWhole` prevents that, but makes Dynamo take 1.5 times as long, so it is used only for models that call an
    RNN.

    Args:
        reads_all: whether to treat all arguments as read, even those that Dynamo has not guarded.
    """
    has_rnns = any(isinstance(each, nn.RNNBase) for each in model.modules())
    if not has_rnns:
        found = _export_with_dynamo(model, args, kwargs, reads_all)
        if not _calls_rnns(found.gm):  # a forward may also call RNN functions without a module
            return found
    with KeepRnnWhole(kernel="loop"):
        return _export_with_dynamo(model, args, kwargs, reads_all)


def _calls_rnns(module: fx.GraphModule) -> bool:
    """Returns whether a graph calls a recurrent network of torch."""
    graphs = (each.graph for each in module.modules() if isinstance(each, fx.GraphModule))
    return any(node.op == "call_function" and node.target in CELLS for graph in graphs for node in graph.nodes)


def _export_with_dynamo(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reads_all: bool) -> _Read:
    """Traces a forward as torch's `dynamo_graph_capture_for_export` does, but keeps side effects that can be repeated.

    Args:
        reads_all: whether to treat all arguments as read, even those that Dynamo has not guarded.
    """
    with (
        refuse_collectives(),
        record_effects() as effects,
        _compiling_state_context(),
        torch._dynamo.config.patch(replay_side_effects=True, side_effect_replay_policy="silent"),
        capture_metrics(),
        dynamo_timed("fullgraph_capture"),
    ):
        out = fullgraph_capture(model, args, kwargs)
    # Torch deletes this name together with the compiled frame. A capture has no frame, so delete it here.
    if out.backend_input is not None:
        out.graph_capture_output.f_globals.pop(out.backend_input.backend_id, None)
    guarded = {"L["} if reads_all else {guard.name for guard in out.graph_capture_output.output_graph.guards}
    names = argument_names(traced_function(model), args, kwargs)
    constants = constants_read(pytree.tree_leaves((args, kwargs)), names, guarded)
    check_read_arguments([*constants.values()], type(model).__name__)
    given = {*traced_function(model).__code__.co_varnames[: 1 + len(args)], *kwargs}
    args, kwargs = _without_unread(args, kwargs, constants)
    gm = create_fx_graph_from_captured_output(out, model, args, kwargs)
    return _Read(gm, out, collect_guards(gm, model, given), effects, args, kwargs, constants, names)


def _trace_joint(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], context: TracingContext
) -> tuple[fx.GraphModule, pytree.TreeSpec]:
    """Traces a module with AOTAutograd. Returns its graph of forward and backward, and the tree structure of the
    results.

    Args:
        context: torch's tracing context, which has the fake tensor mode.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(context))
        stack.enter_context(record_checkpoint_regions())
        # Generate no Python code for graphs that are only traced, as `torch.compile` does.
        stack.enter_context(_use_lazy_graph_module(True))
        joint = aot_export_joint_with_descriptors(stack, module, args, kwargs)
        check_collectives(joint.graph_module.graph)
        _refuse_higher_order_ops(joint.graph_module.graph)
        mark_backward(joint.graph_module.graph)
        return joint.graph_module, joint.out_spec


def _refuse_higher_order_ops(graph: fx.Graph) -> None:
    """Raises `CaptureError` if a traced graph calls an op that calls functions, such as `torch.cond`. Passes would not
    see what these functions do.
    """
    for node in graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            name = node.target.name()
            advice = "use torch.where() instead" if name == "cond" else "use ops of torch that call no function"
            raise CaptureError(
                f"the forward calls the higher-order op {name}, which cannot be captured ({advice})",
                where=source_of(node),
            )
