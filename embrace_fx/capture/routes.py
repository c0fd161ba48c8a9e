"""The two routes from a model and a batch of fake tensors to one ATen graph of forward and backward.

Routes, tried in this order:
    1. Dynamo reads the bytecode of the model's forward into a torch-level graph, which AOTAutograd traces with its
       backward into one ATen graph. Tied parameters stay tied.
    2. AOTAutograd traces the forward directly, as Python runs it on fake tensors. It takes code Dynamo cannot read
       (logging, exotic containers); tied parameters are de-duplicated beforehand, or they would be untied silently.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import fullgraph_capture
from torch._dynamo.functional_export import create_fx_graph_from_captured_output
from torch._dynamo.utils import dynamo_timed
from torch._export.utils import _compiling_state_context
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from embrace_fx.capture.checkpointing import mark_backward, regions_noted
from embrace_fx.capture.collectives import NothingIsSent, check_collectives, collectives_traced
from embrace_fx.capture.effects import Effects, Replay, noted_effects, refuse_effects, replay_of, state_inputs
from embrace_fx.capture.errors import CaptureError
from embrace_fx.capture.guards import DynamoGuards, dynamo_guards, name_of_model
from embrace_fx.capture.kept_by_torch import capture_metrics
from embrace_fx.capture.left_behind import LeftBehind
from embrace_fx.capture.model_forms import STATES, OpenResults, Untied
from embrace_fx.capture.read_values import Both, Conditions, NotesNumbers, NumbersOfTensors, ReadValues
from embrace_fx.capture.rnn_mode import WHOLE, KeepRnnWhole


@dataclass
class Traced:
    """What a route yields.

    Attributes:
        joint: forward and backward, or the forward alone, as AOTAutograd leaves it: inputs and outputs have
            descriptors, and constants of the batch are inputs too.
        out_spec: how the model's results unflatten.
        names: the joint graph's names of parameters and buffers, where they are not the model's -> the model's.
        replay: what the forward does besides, from the graph's results; None: the results are the forward's own.
    """

    joint: fx.GraphModule
    out_spec: pytree.TreeSpec
    fake_mode: Any
    route: str
    conditions: Conditions
    names: Mapping[str, str] = field(default_factory=dict)
    replay: Replay | None = None


def private_copies(
    args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: frozenset[tuple[int, int]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Stand-ins for the batch's tensors: marking dimensions must not leave marks on the user's tensors.

    Each has a storage of its own and begins at its start: batches cut out of one long tensor begin elsewhere each time.
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
    """Dynamo as this capture needs it.

    Numbers are constants and sizes vary where this capture says so, whatever Dynamo has seen of other models.
    """
    options = {
        "allow_rnn": True,
        "specialize_int": True,
        "specialize_float": True,
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
    }
    with torch._dynamo.config.patch(options), warnings.catch_warnings():
        # Where warnings are errors, Dynamo would give up for what torch warns of meanwhile. Of autograd functions:
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        warnings.filterwarnings("ignore", "Guards may run slower", RuntimeWarning)  # of Python 3.13.0
        yield


class _KeepWhole(KeepRnnWhole):
    """What ATen tracing must not take apart, or turn into what cannot be traced: RNNs, and sparse-gradient lookups."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if (lookup := _LOOKUPS.get(func)) is not None:
            return lookup(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, dict(kwargs or {}))


def embedding(*args: Any, **kwargs: Any) -> Any:
    """`torch.nn.functional.embedding` with a dense gradient.

    A sparse gradient is a tensor of another layout, which no ATen graph holds. The planner decides how the gradient
    travels; what the user gets in the end follows the optimizer, not this flag.
    """
    return torch.nn.functional.embedding(*_without_sparse(args, kwargs, 6), **kwargs)


def embedding_bag(*args: Any, **kwargs: Any) -> Any:
    """`torch.nn.functional.embedding_bag`, likewise."""
    return torch.nn.functional.embedding_bag(*_without_sparse(args, kwargs, 7), **kwargs)


_LOOKUPS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.embedding: embedding,
    torch.nn.functional.embedding_bag: embedding_bag,
}


def _without_sparse(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> tuple[Any, ...]:
    """The positional arguments of a lookup; those by name are changed in place."""
    if "sparse" in kwargs:
        kwargs["sparse"] = False
    return (*args[:position], False, *args[position + 1 :]) if len(args) > position else args


def _keep_whole(read: fx.GraphModule) -> None:
    """Has Dynamo's graph, and those of the regions in it, call what `_KeepWhole` would put in the place of calls."""
    for module in read.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        found = [node for node in module.graph.nodes if node.op == "call_function" and node.target in _INSTEAD]
        for node in found:
            node.target = _INSTEAD[node.target]
        if found:
            module.recompile()


_INSTEAD = {**_LOOKUPS, **WHOLE}


def trace_dynamo(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    gm, out, conditions, effects = _read(model, args, kwargs)
    _keep_whole(gm)
    context = gm.meta.get("tracing_context") or TracingContext(gm.meta["fake_mode"])
    # For guards, which are made. C++ owns what a fake tensor's sizes refer to, these sizes among it: they would keep
    # their own tensors, and all else of the capture, for ever.
    sizes: Any = context.fake_mode and context.fake_mode.shape_env
    if sizes is not None:
        sizes.tracked_fakes = []
    itself, values = name_of_model(model), conditions.values
    numbers = _numbers_read(gm.graph, itself, values)
    if not effects:
        return _trace_joint(OpenResults(gm), args, kwargs, context, "dynamo", {}, Both(conditions, numbers))
    effects = effects.of(itself)
    refuse_effects(effects, model)
    states = state_inputs(gm.graph, itself)
    replay = replay_of(out, model, effects, list(states.values()), values)
    kwargs = {**kwargs, STATES: replay.read_states()}
    module = OpenResults(gm, tuple(states))
    read = Both(conditions.without(replay.states), numbers)
    traced = _trace_joint(module, args, kwargs, context, "dynamo", {}, read)
    return replace(traced, replay=replay)


def _numbers_read(graph: fx.Graph, itself: str, values: ReadValues) -> NumbersOfTensors:
    """Of Dynamo's graph: its inputs are what the forward reads of the model and of globals, too."""
    inputs, found = graph.find_nodes(op="placeholder"), dict(zip(values.names, values.values, strict=True))
    tensors = {inputs[k]: found.get(name) for k, name in state_inputs(graph, itself).items()}
    return NumbersOfTensors.of_graph(graph, {node: each for node, each in tensors.items() if isinstance(each, Tensor)})


def _read(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, Any, DynamoGuards, Effects]:
    """Dynamo's graph of a forward, all it has found, its guards, and the forward's effects.

    Dynamo runs every call on fake tensors for the results' shapes; unrolled, an RNN would fix its number of steps. The
    mode that prevents it makes Dynamo half as slow again, so it is left out where no RNN is called.
    """
    has_rnns = any(isinstance(each, nn.RNNBase) for each in model.modules())
    if not has_rnns:
        with collectives_traced(), noted_effects() as effects:
            gm, out = _read_by_dynamo(model, args, kwargs)
            if not _calls_rnns(gm):  # a function may be called without a module
                return gm, out, dynamo_guards(gm, model), effects
    with KeepRnnWhole(kernel="loop"), collectives_traced(), noted_effects() as effects:
        gm, out = _read_by_dynamo(model, args, kwargs)
        return gm, out, dynamo_guards(gm, model), effects


def _calls_rnns(read: fx.GraphModule) -> bool:
    graphs = (each.graph for each in read.modules() if isinstance(each, fx.GraphModule))
    return any(node.op == "call_function" and node.target in WHOLE for graph in graphs for node in graph.nodes)


def _read_by_dynamo(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.GraphModule, Any]:
    """Dynamo's graph of a forward and all it has found: as `dynamo_graph_capture_for_export`, with effects replayed."""
    with (
        _compiling_state_context(),
        torch._dynamo.config.patch(replay_side_effects=True, side_effect_replay_policy="silent"),
        capture_metrics(),
        dynamo_timed("fullgraph_capture"),
    ):
        out = fullgraph_capture(model, args, kwargs)
    # A compiled frame's end takes this name out again; a capture has no frame, and the graph would stay for ever.
    if out.backend_input is not None:
        out.graph_capture_output.f_globals.pop(out.backend_input.backend_id, None)
    return create_fx_graph_from_captured_output(out, model, args, kwargs), out


def trace_direct(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    left = LeftBehind(model)
    try:
        traced = _trace_as_python(model, args, kwargs)
    finally:
        name = left.put_back()
    if name is not None:
        left.refuse(name)
    if left.numbers:  # a number that is the same after each call is no state: what was found once is kept
        again = LeftBehind(model)
        traced = _trace_as_python(model, args, kwargs)
        again.put_back()
        if again.numbers:
            left.reset_numbers()
            left.refuse(again.numbers[0])
    return traced


def _trace_as_python(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    untied = Untied(model)
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    args, kwargs = pytree.tree_map_only(Tensor, lambda own: _fake(own, fake_mode), (args, kwargs))
    read, context = ReadValues.of_modules(model), TracingContext(fake_mode)
    own = {id(each) for each in (*model.parameters(), *model.buffers())}
    numbers = NotesNumbers(lambda read: type(read) is Tensor and id(read) not in own)
    with (
        numbers,
        _no_python_random(),
        NothingIsSent(),  # type: ignore[no-untyped-call]
        _compiling_state_context(),
    ):  # models ask `is_compiling()` before they look into tensors
        traced = _trace_joint(OpenResults(untied), args, kwargs, context, "direct", untied.names, read)
    if untied.assigned is not None:
        LeftBehind(model).refuse(untied.assigned)
    return replace(traced, conditions=Both(read.unchanged(), NumbersOfTensors.of(numbers.found)))


@contextlib.contextmanager
def _no_python_random() -> Iterator[None]:
    """Refuses a forward that draws from `random` or numpy: the graph would hold what was drawn once.

    Raises:
        CaptureError: at the end.
    """
    before = _random_states()
    yield
    if _random_states() != before:
        raise CaptureError(
            "the forward draws random numbers from Python's `random` or from numpy, which a graph would draw once and "
            "never again; draw them in the training loop and pass them as an argument, or draw them by torch"
        )


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else tuple(map(str, numpy.random.get_state(legacy=False)["state"].values()))
    return random.getstate(), of_numpy


def _fake(own: Tensor, fake_mode: FakeTensorMode) -> Tensor:
    """A fake tensor whose marked dimensions have symbolic sizes."""
    marked = getattr(own, "_dynamo_weak_dynamic_indices", ())
    sizes = [DimDynamic.DYNAMIC if dim in marked else DimDynamic.STATIC for dim in range(own.dim())]
    return fake_mode.from_tensor(own, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


def _trace_joint(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: TracingContext,
    route: str,
    names: Mapping[str, str],
    conditions: Conditions,
) -> Traced:
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(context))
        if route == "direct":
            stack.enter_context(_KeepWhole())
        stack.enter_context(regions_noted())
        # As `torch.compile` does: of graphs that are only traced, no Python code is made.
        stack.enter_context(_use_lazy_graph_module(True))
        # The direct route has made its sizes symbolic by itself; its numbers stay constants.
        joint = aot_export_joint_with_descriptors(stack, module, args, kwargs, ignore_shape_env=route == "direct")
        check_collectives(joint.graph_module.graph)
        mark_backward(joint.graph_module.graph)
        return Traced(joint.graph_module, joint.out_spec, context.fake_mode, route, conditions, names)
