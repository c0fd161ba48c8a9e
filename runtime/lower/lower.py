"""Turns a phase of a partitioned graph into a Python function.

Contract
    Same order, same values. Local `embrace::` ops become direct calls of their kernels, and collectives calls of the
    pipeline (their result is in flight until its wait); all other ops stay ATen calls. Arguments come in one list
    that the function empties, so that a value dies with its last use.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from embrace_fx.runtime.kernels import LOCAL
from embrace_fx.runtime.lower import rnn
from embrace_fx.runtime.lower.regions import Compiled, Region, compile_regions
from embrace_fx.vocabulary.graph import Buffer, Parameter, Shard
from embrace_fx.vocabulary.in_place import IN_PLACE, overwritten_argument
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.ops import op_name

Phase = Callable[[list[Any]], tuple[Any, ...]]
Call = Callable[[fx.Node], Callable[..., Any] | None]
"""Finds what a node calls."""


class _ListArgumentCodeGen(CodeGen):
    """Generates code for a function that takes all arguments in one list, and empties it so that they can be freed."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """Returns the source code of the function's first lines."""
        names = [var.split(":")[0].split("=")[0].strip() for var in free_vars if var != "self"]
        unpack = f"\n    {', '.join(names)}, = arguments" if names else ""
        return f"def {self._func_name}(self, arguments){maybe_return_annotation}:{unpack}\n    arguments.clear()"


def lower_phase(
    module: fx.GraphModule,
    call: Call = lambda node: None,
    compile_region: Callable[[Region], Compiled | None] | None = None,
) -> Phase:
    """Converts the graph of a phase, such as the forward or the backward, to a Python function that runs it.

    Args:
        module: the phase's graph, in which placeholders and outputs have roles.
        call: returns the runtime function that a node calls, or None to call a kernel or one of torch's ops.
        compile_region: compiles a region, the compute between two communications. None to call each op separately.
    """
    kernels: dict[str, Callable[..., Any]] = {**LOCAL, **rnn.KERNELS}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            env[node] = graph.get_attr(str(node.target))
            continue
        copied = env[node] = graph.node_copy(node, env.__getitem__)
        if copied.name != node.name:
            copied.name = node.name
        copied.meta["val"] = None if _is_in_flight(node) else node.meta.get("val")
        copied.meta["fixed"] = _has_fixed_address(node)
        copied.meta["copies"] = op_name(node) == "embrace::pack_bucket"
        if isinstance(node.target, torch._ops.OpOverload):
            copied.target = call(node) or kernels.get(op_name(node), node.target)
    if compile_region is not None:
        compile_regions(module, graph, compile_region)
    _write_in_place(graph)
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.target = _fast_call(node.target)
    graph.set_codegen(_ListArgumentCodeGen())
    lowered = fx.GraphModule(module, graph)
    run: Phase = lowered.forward
    return run


def phase_source(phase: Phase) -> str:
    """Returns the Python source of a lowered phase. Each line that launches a collective ends with its id as a comment.

    Assignments that only free values are left out, and calls of runtime methods are shown by the methods' names.
    """
    module = phase.__self__  # type: ignore[attr-defined]  # a method of its GraphModule
    known, lines = {node.name: node for node in module.graph.nodes}, list[str]()
    for line in module.code.strip().splitlines():
        text = line.split(";  ")[0] if not line.lstrip().startswith("def ") else line.replace("forward(self, ", "run(")
        node = known.get(text.split(" = ")[0].strip())
        if node is None or node.op != "call_function":
            lines.append(text)
            continue
        target: Any = node.target
        if target is not operator.getitem:
            call = getattr(target, "func", target)
            of_torch = isinstance(call, types.BuiltinFunctionType | types.MethodDescriptorType)
            its_own = getattr(call, "__qualname__", type(call).__name__).split(".<locals>.")[-1]
            name = f"{getattr(target, '__module__', 'torch.Tensor')}.{target.__name__}" if of_torch else its_own
            text = f"    {node.name} = {name}({text.partition('(')[2]}"
        made = [each for each in getattr(target, "args", ()) if isinstance(each, OperationId)]
        lines.append(text + "".join(f"  # {each}" for each in made))
    return "\n".join(lines) + "\n"


def _write_in_place(graph: fx.Graph) -> None:
    """Makes ops overwrite inputs that no later node reads, instead of allocating new memory."""
    for node in graph.nodes:
        position = overwritten_argument(node)
        if position is not None:
            node.args = (node.args[position], *(a for k, a in enumerate(node.args) if k != position))
            node.target = IN_PLACE[node.target]


@cache
def _fast_call(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Returns the callable that runs an op with the least overhead: torch's Python binding if it is known to take the
    op's arguments, otherwise the op's dispatcher call.
    """
    name = op._schema.name.removeprefix("aten::")
    if str(op).removeprefix("aten.") in _BOUND:
        bound: Callable[..., Any] = getattr(torch._C._VariableFunctions, name, None) or getattr(torch.Tensor, name)
        return bound
    call: Callable[..., Any] = partial(op._op)
    call.__module__, call.__name__ = op.namespace, str(op).removeprefix(f"{op.namespace}.").replace(".", "_")
    return call


_BOUND = frozenset(
    {
        *("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "add_.Tensor", "sub_.Tensor", "mul_.Tensor"),
        *("div_.Tensor", "neg.default", "exp.default", "sqrt.default", "rsqrt.default", "pow.Tensor_Scalar"),
        *("tanh.default", "sigmoid.default", "relu.default", "erf.default", "where.self", "addcmul.default"),
        *("mm.default", "bmm.default", "addmm.default", "baddbmm.default", "sum.dim_IntList", "mean.dim"),
        *("view.default", "expand.default", "t.default", "transpose.int", "permute.default", "unsqueeze.default"),
        *("squeeze.dim", "select.int", "cat.default", "clone.default", "detach.default", "split_with_sizes.default"),
        *("_softmax.default", "_softmax_backward_data.default", "_log_softmax.default", "native_dropout.default"),
        *("_log_softmax_backward_data.default", "native_layer_norm.default", "embedding.default"),
        *("index_select.default", "gather.default", "convolution.default"),
    }
)
"""Ops of aten whose bindings take what their schemas say, by position and by name."""


def _is_in_flight(node: fx.Node) -> bool:
    """Returns whether a node launches a collective, so that its value is a tensor only after a `wait_tensor`."""
    return any(op_name(user) == "_c10d_functional::wait_tensor" for user in node.users)


def _has_fixed_address(node: fx.Node) -> bool:
    """Returns whether a value is at the same memory address in every step."""
    if node.op == "placeholder":
        return isinstance(node.meta.get("role"), Parameter | Buffer | Shard)
    return op_name(node) in ("embrace::update_bucket", "embrace::update_rows")
