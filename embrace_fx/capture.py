"""Capture: a model and one batch -> a `TrainingGraph` of ATen ops. All use of torch's private capture API lives here.

Routes, tried in this order:
    1. Dynamo reads the bytecode of the model's forward into a torch-level graph, which AOTAutograd traces with its
       backward into one ATen graph. Tied parameters stay tied.
    2. AOTAutograd traces the forward directly, as Python runs it on fake tensors. It takes code Dynamo cannot read
       (logging, exotic containers); tied parameters are de-duplicated beforehand, or they would be untied silently.
Where neither can, `CaptureError` names the user's line.

Contract
    Nothing of the model runs: tensors are fake, so a model on the meta device or larger than memory can be captured.
    The graph is functional; what the forward mutates (BatchNorm's statistics) comes back as `Mutation` outputs.
    RNNs stay whole (`KeepRnnWhole`), tables keep their own ops (`embedding`, `_embedding_bag`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import random
import re
import sys
import traceback
import types
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._export.utils import _compiling_state_context
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._logging._internal import trace_structured
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from embrace_fx.graph import (
    BatchInput,
    Buffer,
    Gradient,
    InputRole,
    Mutation,
    OutputRole,
    Parameter,
    Result,
    Tangent,
    TrainingGraph,
    inputs_of,
    outputs_of,
)
from embrace_fx.read_values import ReadValues
from embrace_fx.result_objects import open_objects
from embrace_fx.rnn_mode import KeepRnnWhole

_IDENTITIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)

_LOG_METHODS = ("debug", "info", "warning", "warn", "error", "exception", "critical", "log")
"""How methods that write to a log begin; libraries add their own to the class, `warning_once` say."""

_GLOBAL_SIDE_EFFECTS = r"While compiling, we found certain side effects(?!.*L\[)"
"""Dynamo's warning where none of the changed objects belongs to the model (those it calls `L[...]`)."""


class CaptureError(RuntimeError):
    """The model's forward cannot be captured as one graph."""


@dataclass(frozen=True)
class Captured:
    """A captured graph and the batches it is valid for.

    Attributes:
        graph: forward and backward, or the forward alone where `train` is false.
        result_spec: how the model's results unflatten.
        result_constants: results that are not tensors, by their index among the flattened results.
        route: "dynamo" or "direct".
        guard: Python expression over the batch's tensors, from torch's shape guards; None: any shapes.
        guarded: indices, among the flattened arguments, of the tensors that `guard` calls t0, t1, ...
        fakes: those tensors as the graph was traced with them; none where there is nothing to guard.
        read: numbers, and tensors that are no parameters or buffers, that the forward has read elsewhere.
    """

    graph: TrainingGraph
    result_spec: pytree.TreeSpec
    result_constants: Mapping[int, Any]
    route: str
    guard: types.CodeType | None
    guarded: tuple[int, ...]
    fakes: tuple[Tensor, ...]
    read: ReadValues

    def guarded_again(self) -> Captured:
        """The same, with the guards that have been added since: compiling a graph adds some."""
        return replace(self, guard=_guard(self.fakes)) if self.fakes else self

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """Whether the graph is valid for a batch with these flattened arguments (types and dtypes checked before)."""
        if not self.read.hold():
            return False
        if self.guard is None:
            return True
        tensors = {f"t{k}": leaves[index] for k, index in enumerate(self.guarded)}
        return bool(eval(self.guard, SYMPY_INTERP, {"L": tensors}))


@dataclass
class _Traced:
    joint: fx.GraphModule
    out_spec: pytree.TreeSpec
    fake_mode: Any
    route: str
    read: ReadValues
    names: Mapping[str, str] = field(default_factory=dict)


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    train: bool,
    dynamic: frozenset[tuple[int, int]] = frozenset(),
) -> Captured:
    """Captures the model's forward, and its backward if `train`.

    Args:
        args, kwargs: one batch, exactly as the model is called with it.
        dynamic: (index among the flattened arguments, dimension) pairs whose size may vary from batch to batch.

    Raises:
        CaptureError: neither route can take the model; the message names the user's line and both reasons.
    """
    args, kwargs = _private_copies(args, kwargs, dynamic)
    failures: list[tuple[str, Exception]] = []
    for route, trace in (("dynamo", _trace_dynamo), ("direct", _trace_direct)):
        try:
            with torch.set_grad_enabled(train), _quiet():
                traced = trace(model, args, kwargs)
            return _finish(model, traced, args, kwargs)
        except Exception as error:
            failures.append((route, error))
    raise CaptureError(_explain(model, failures)) from failures[0][1]


def log_graph(name: str, module: fx.GraphModule) -> None:
    """Hands a graph's text to torch's structured trace, where `tlparse` shows it."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"embrace_fx_{name}", "encoding": "string"},
        payload_fn=lambda: module.print_readable(print_output=False, include_stride=False, include_device=False),
        expect_trace_id=False,
    )


def log_text(name: str, text: str) -> None:
    """Hands a report to torch's structured trace."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"embrace_fx_{name}", "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


def _private_copies(
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
def _quiet() -> Iterator[None]:
    """Dynamo as this capture needs it.

    Numbers are constants and sizes vary where this capture says so, whatever Dynamo has seen of other models; a log
    message is no reason to give up, it is left out.
    """
    loggers = {value for name, value in vars(logging.Logger).items() if name.startswith(_LOG_METHODS)}
    options = {
        "allow_rnn": True,
        "specialize_int": True,
        "specialize_float": True,
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": True,
        "ignore_logging_functions": loggers,
    }
    with torch._dynamo.config.patch(options), warnings.catch_warnings():
        # A model that counts its own calls is told that the count stands still; libraries' switches concern nobody.
        warnings.filterwarnings("ignore", _GLOBAL_SIDE_EFFECTS, UserWarning)
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
        named = dict(kwargs or {})
        if func is torch.nn.functional.embedding:
            # A sparse gradient is a tensor of another layout, which no ATen graph holds. The planner decides how the
            # gradient travels; what the user gets in the end follows the optimizer, not this flag.
            args, named = _without_sparse(args, named, 6)
        elif func is torch.nn.functional.embedding_bag:
            args, named = _without_sparse(args, named, 7)
        return super().__torch_function__(func, types, args, named)


def _without_sparse(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if len(args) > position:
        args = (*args[:position], False, *args[position + 1 :])
    if "sparse" in kwargs:
        kwargs["sparse"] = False
    return args, kwargs


def _trace_dynamo(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Traced:
    # Dynamo runs every call on fake tensors for the results' shapes; unrolled, an RNN would fix its number of steps.
    with KeepRnnWhole(kernel="loop"):
        gm = dynamo_graph_capture_for_export(model)(*args, **kwargs)
    context = gm.meta.get("tracing_context") or TracingContext(gm.meta["fake_mode"])
    return _trace_joint(_OpenResults(gm), args, kwargs, context, "dynamo", {}, _read_by(gm, model))


_VALUE_GUARDS = ("CONSTANT_MATCH", "EQUALS_MATCH", "TENSOR_MATCH")
_OTHER_GUARDS = re.compile(r"\._(parameters|buffers)\b|\.training$")
"""What programs read as it is at each call, and what calls are told apart by already."""


def _read_by(gm: fx.GraphModule, model: nn.Module) -> ReadValues:
    """What Dynamo has guarded besides arguments, parameters, buffers and training modes."""
    flatten: Any = gm._dynamo_bytecode_flatten
    output = flatten.out.graph_capture_output
    forward: Any = type(model).forward
    code = getattr(forward, "__code__", None)
    cells = dict(zip(code.co_freevars, forward.__closure__ or (), strict=True)) if code is not None else {}
    model_is = f"L['{code.co_varnames[0]}']" if code is not None and code.co_argcount else "L['args'][0]"  # decorated
    names = []
    for guard in output.output_graph.guards:
        name = guard.name.replace(model_is, "L['self']")
        root = re.match(r"(.*?)([LG])\['(\w+)'\]", name)
        if guard.create_fn_name() not in _VALUE_GUARDS or root is None or _OTHER_GUARDS.search(name):
            continue
        if root[2] == "G" or root[3] == "self":
            names.append(name)
        elif root[3] in cells:
            names.append(f"{root[1]}C[{root[3]!r}].cell_contents{name[root.end() :]}")
    of_globals = ChainMap(getattr(forward, "__globals__", {}), output.f_globals)
    return ReadValues.of(dict.fromkeys(names), {"L": {"self": model}, "G": of_globals, "C": cells})


def _trace_direct(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Traced:
    untied = _Untied(model)
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    args, kwargs = pytree.tree_map_only(Tensor, lambda own: _fake(own, fake_mode), (args, kwargs))
    read, context = ReadValues.of_modules(model), TracingContext(fake_mode)
    with _no_python_random(), _compiling_state_context():  # models ask `is_compiling()` before they look into tensors
        traced = _trace_joint(_OpenResults(untied), args, kwargs, context, "direct", untied.names, read)
    return replace(traced, read=read.unchanged())


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


class _OpenResults(nn.Module):
    """A module, its names included, whose results are trees of tensors, each with memory of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._call = [module]  # in a list: not a submodule, which would give each parameter a second name
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._modules = module._modules

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        results = _run_by_node(self._call[0], args, kwargs)
        return open_objects(results, (*self.parameters(), *pytree.tree_leaves((args, kwargs))))


def _run_by_node(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The module's results. A graph runs node by node: only so do ATen nodes inherit the user's lines."""
    if not isinstance(module, fx.GraphModule):
        return module(*args, **kwargs)
    inputs = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    with fx.traceback.preserve_node_meta():
        return fx.Interpreter(module).run(*inputs.values())


class _Untied(nn.Module):
    """A model with every parameter and buffer registered once, whatever the number of its names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._call = [model]  # in a list: not a submodule, whose parameters would be registered twice
        self._own_names: dict[int, str] = {}
        self.names: dict[str, str] = {}
        self._aliases: list[tuple[str, str]] = []
        for fqn, value in model.named_parameters(remove_duplicate=False):
            self._register(fqn, value, nn.Module.register_parameter)
        for fqn, buffer in model.named_buffers(remove_duplicate=False):
            self._register(fqn, buffer, nn.Module.register_buffer)

    def _register(self, fqn: str, value: Any, register: Callable[..., None]) -> None:
        if id(value) not in self._own_names:
            own = fqn.replace(".", "__")
            self._own_names[id(value)] = own
            self.names[own] = fqn
            register(self, own, value)
        self._aliases.append((fqn, self._own_names[id(value)]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        named = {fqn: getattr(self, own) for fqn, own in self._aliases}
        return torch.func.functional_call(self._call[0], named, args, kwargs, tie_weights=False)


def _trace_joint(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: TracingContext,
    route: str,
    names: Mapping[str, str],
    read: ReadValues,
) -> _Traced:
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(context))
        stack.enter_context(_KeepWhole())
        # The direct route has made its sizes symbolic by itself; its numbers stay constants.
        joint = aot_export_joint_with_descriptors(stack, module, args, kwargs, ignore_shape_env=route == "direct")
        return _Traced(joint.graph_module, joint.out_spec, context.fake_mode, route, read, names)


def _finish(model: nn.Module, traced: _Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    leaves = pytree.tree_leaves((args, kwargs))
    first_names = _first_names(model)
    module = _flat_module(traced.joint)
    placeholders: dict[int, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op != "placeholder":
            continue
        if isinstance(node.meta["desc"], aot.TangentAOTInput) and not isinstance(
            node.meta["desc"].output, aot.PlainAOTOutput
        ):
            _drop_zero_tangent(module, node)
            continue
        role = _input_role(node.meta["desc"], traced.names, first_names)
        node.meta["role"] = role
        if isinstance(role, BatchInput) and not isinstance(leaves[role.index], Tensor):
            module.graph.erase_node(node)  # a constant of the graph: other values lead to another capture
        elif isinstance(role, BatchInput):
            placeholders[role.index] = node
    constants = _set_output_roles(module, traced.names, first_names)
    _drop_identities(module)
    module.graph.eliminate_dead_code()
    _drop_unread_state(module)
    _rename(module)
    module.recompile()
    guarded, fakes = _guarded(traced.fake_mode, placeholders, leaves)
    guard = _guard(fakes) if fakes else None
    graph = TrainingGraph(module)
    return Captured(graph, traced.out_spec, constants, traced.route, guard, guarded, fakes, traced.read)


def _drop_zero_tangent(module: fx.GraphModule, tangent: fx.Node) -> None:
    """Removes the gradient of a mutated parameter's new value (`max_norm`): zero, as nothing differentiates it."""
    for user in list(tangent.users):
        if user.target is torch.ops.aten.add.Tensor and not user.kwargs:
            other = user.args[1] if user.args[0] is tangent else user.args[0]
            assert isinstance(other, fx.Node)
            user.replace_all_uses_with(other)
            module.graph.erase_node(user)
    if tangent.users:
        raise CaptureError(
            f"expected a parameter mutated by the forward to take part in no other computation, found {tangent.name} "
            f"read by {', '.join(u.name for u in tangent.users)}. Mutate parameters outside of the forward."
        )
    module.graph.erase_node(tangent)


def _first_names(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> the first of its names (tied ones have several)."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for fqn, value in named:
            names[fqn] = first.setdefault(id(value), fqn)
    return names


def _flat_module(joint: fx.GraphModule) -> fx.GraphModule:
    """The same graph with plain placeholders and one tuple of outputs, instead of (primals, tangents)."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.op == "output":
            values = pytree.tree_leaves(node.args[0])
            copied = tuple(env[v] if isinstance(v, fx.Node) else v for v in values)
            output = graph.output(copied)
            output.meta = dict(node.meta)
            output.meta["desc"] = pytree.tree_leaves(node.meta["desc"])
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta = dict(node.meta)
    return fx.GraphModule(joint, graph)


def _input_role(desc: Any, names: Mapping[str, str], first_names: Mapping[str, str]) -> InputRole:
    match desc:
        case aot.ParamAOTInput(target=target):
            return Parameter(first_names[names.get(target, target)])
        case aot.BufferAOTInput(target=target):
            return Buffer(first_names[names.get(target, target)])
        case aot.PlainAOTInput(idx=index):
            return BatchInput(index)
        case aot.TangentAOTInput(output=aot.PlainAOTOutput(idx=index)):
            return Tangent(index)
    raise CaptureError(
        f"expected parameters, buffers, batch tensors and output gradients as graph inputs, found {desc}. "
        "Return tensors that are not views of each other or of an argument (`.clone()` them)."
    )


def _set_output_roles(
    module: fx.GraphModule, names: Mapping[str, str], first_names: Mapping[str, str]
) -> dict[int, Any]:
    output = module.graph.output_node()
    values: list[fx.Node] = []
    roles: list[OutputRole] = []
    constants: dict[int, Any] = {}
    for value, desc in zip(output.args[0], output.meta.pop("desc"), strict=True):  # type: ignore[arg-type]
        if desc is None:  # the place of a gradient that does not exist: an integer input's
            continue
        role: OutputRole
        match desc:
            case aot.PlainAOTOutput(idx=index):
                role = Result(index)
            case aot.InputMutationAOTOutput(mutated_input=mutated):
                of = _input_role(mutated, names, first_names)
                assert isinstance(of, Parameter | Buffer | BatchInput)
                role = Mutation(of)
            case aot.GradAOTOutput(grad_of=grad_of):
                source = _input_role(grad_of, names, first_names)
                assert isinstance(source, Parameter | Buffer | BatchInput)
                if value is None or isinstance(source, Buffer):
                    continue
                role = Gradient(source)
            case _:
                raise CaptureError(
                    f"expected results, mutations and gradients as graph outputs, found {desc}. "
                    "Return tensors that are not views of each other or of an argument (`.clone()` them)."
                )
        if isinstance(value, fx.Node):
            values.append(value)
            roles.append(role)
        elif isinstance(role, Result):
            constants[role.index] = value
    output.args = (tuple(values),)
    output.meta["roles"] = tuple(roles)
    return constants


def _drop_identities(module: fx.GraphModule) -> None:
    """Removes nodes that only matter to autograd: the graph has its backward already."""
    for node in list(module.graph.nodes):
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _drop_unread_state(module: fx.GraphModule) -> None:
    """Removes parameters and buffers that nothing reads or writes: unused ones, and the second names of tied ones."""
    kept = {value for value, _ in outputs_of(module)}
    written = {role.of for _, role in outputs_of(module) if isinstance(role, Mutation)}
    for node, role in list(inputs_of(module)):
        if isinstance(role, Parameter | Buffer) and not node.users and node not in kept and role not in written:
            module.graph.erase_node(node)


def _rename(module: fx.GraphModule) -> None:
    """Placeholders are named after what they are, so that a printed graph can be read."""
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        match node.meta["role"]:
            case Parameter(name) | Buffer(name):
                wanted = re.sub(r"\W", "_", name)
            case BatchInput(index):
                wanted = f"batch_{index}"
            case Tangent(index):
                wanted = f"tangent_{index}"
        node._rename(wanted)
        node.target = node.name


def _guarded(
    fake_mode: Any, placeholders: Mapping[int, fx.Node], leaves: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """The batch's tensors, by their indices and as the graph was traced with them."""
    if fake_mode is None or fake_mode.shape_env is None:
        return (), ()
    indices = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    fakes = tuple(
        placeholders[i].meta["val"] if i in placeholders else fake_mode.from_tensor(leaves[i], static_shapes=True)
        for i in indices
    )
    return indices, fakes


def _guard(fakes: Sequence[Any]) -> types.CodeType | None:
    """Torch's own shape guards over all tensors of the batch, static sizes included."""
    try:
        text = fakes[0].fake_mode.shape_env.produce_guards_expression(fakes, ignore_static=False)
    except IndexError as error:  # torch looks for the size that a symbol stands for, and a value is no size
        raise CaptureError("the path through the forward depends on the value of a tensor") from error
    text = re.sub(r"L\['t\d+'\]\.storage_offset\(\) == 0", "True", text or "")  # nothing in the graph depends on it
    return compile(text, "<shape guards>", "eval") if text else None


def _explain(model: nn.Module, failures: Sequence[tuple[str, Exception]]) -> str:
    where = next((line for _, e in failures if (line := _user_line(e))), f"{type(model).__name__}.forward")
    reasons = "\n".join(f"  {route}: {type(e).__name__}: {_first_lines(e)}" for route, e in failures)
    if (own := next((e for route, e in failures if route == "direct" and _is_of_forward(e)), None)) is not None:
        return (
            f"expected a batch that the forward takes, in {type(model).__name__}, at {_user_line(own) or where}, found "
            f"that the forward fails on it: {type(own).__name__}: {_first_lines(own)}. Call the model with the "
            "arguments, names, shapes, types and devices that it expects; without compile() it fails alike.\n"
            f"Found:\n{reasons}"
        )
    return (
        f"expected a forward that can be captured as one graph, in {type(model).__name__}, at "
        f"{where}.\nFound:\n{reasons}\n"
        "Rewrite that line so that it does not depend on tensor values (no `.item()`, no `if tensor:`, no "
        "data-dependent shapes), or move it out of the model into the training loop."
    )


def _is_of_forward(error: Exception) -> bool:
    """Whether a forward would raise this in eager mode too: what tracing alone raises speaks of its fake tensors."""
    spoken = str(error).lower()
    of_tracing = "fake" in spoken or "subclass" in spoken or "symbolic" in spoken or "data-dependent" in spoken
    return type(error).__module__ == "builtins" and not isinstance(error, AssertionError) and not of_tracing


def _user_line(error: Exception) -> str | None:
    """The last line of the user's code: Dynamo prints it, the direct route has it in the traceback."""
    printed = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', str(error).partition("from user code")[2])
    frames = printed or [(f.filename, str(f.lineno), f.name) for f in traceback.extract_tb(error.__traceback__)]
    others = (torch.__file__.rpartition("/")[0], __file__.rpartition("/")[0], inspect.__file__, "<")
    own = [f for f in frames if not f[0].startswith(others)]
    return "{}:{} in {}".format(*own[-1]) if own else None


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or "no message"
