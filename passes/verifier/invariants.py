"""Verifies a training graph after a pass. Each invariant is a function that yields violations.

Contract
    `verify` only reads: it changes neither the graph nor the symbols and guards of its fake tensors. The invariants are
    checked in the order of `INVARIANTS`, then those of windows. Each may rely on those before it. The first broken one
    raises, with the name of its function.

A partitioned graph has several modules: the joint module, for reading, and the phases, which run. Each must be legal.
Outputs of the whole graph are counted over the modules that run.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from embrace_fx.passes.collectives import (
    aliased_inputs,
    is_launch,
    is_wait,
)
from embrace_fx.passes.rewriter import fake_mode_of
from embrace_fx.passes.verifier.again import copies_equal_originals, replays_draw_equally
from embrace_fx.passes.verifier.copies import copies_in_pairs, freed_values_unread, within_memory_limit
from embrace_fx.passes.verifier.fake_values import find_disagreement, is_derived, is_unchanged, without_recording
from embrace_fx.passes.verifier.violation import Violation
from embrace_fx.passes.verifier.whole_graph import collectives_in_one_order, forward_kept, parameters_updated_once
from embrace_fx.passes.verifier.windows import INVARIANTS as WINDOW_INVARIANTS
from embrace_fx.vocabulary.graph import (
    Gradient,
    InputRole,
    Mutation,
    OutputRole,
    Result,
    Saved,
    Tangent,
    TrainingGraph,
    after_tangents,
    inputs_of,
    outputs_of,
    source_of,
)
from embrace_fx.vocabulary.ops import LAUNCHES, op_name
from embrace_fx.vocabulary.submissions import overlaps_steps

_SYM_OPS: frozenset[Callable[..., object]] = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod, operator.pow),
        *(operator.neg, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        *(operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift),
        *(math.ceil, math.floor, math.trunc),
        *(torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite, torch.sym_sum),
        *(operator.abs, round),
        # torch calls these functions for functions of `math` on symbolic numbers.
        *(getattr(torch, f"_sym_{name}") for name in ("sqrt", "log2", "cos", "sin", "tan", "acos", "asin", "atan")),
        *(getattr(torch, f"_sym_{name}") for name in ("cosh", "sinh", "tanh")),
    }
)
"""Python functions that compute sizes and other numbers, from numbers to numbers."""


class VerificationError(RuntimeError):
    """A pass produced a graph that breaks an invariant: a defect of the pass, not of the user's model."""


def verify(
    graph: TrainingGraph,
    *,
    after: str,
    captured: TrainingGraph | None = None,
    previous: TrainingGraph | None = None,
) -> None:
    """Checks every invariant of `graph`.

    Args:
        after: the pass that produced `graph`, for the error message.
        captured: the graph at the start of the pipeline, whose trained parameters, results and mutations must be kept.
            None for `graph` itself.
        previous: a graph that has already been verified. Modules that it shares with `graph` are not checked again, and
            values of unchanged nodes are not computed again.

    Raises:
        VerificationError: names the first broken invariant, the pass, the node and the user's source line.
    """
    verified = _nodes_by_name(previous.module) if previous else {}
    handed_on: frozenset[str] = frozenset()
    for phase, module in {"joint": graph.module, **graph.phases}.items():
        before = previous.phases.get(phase) if previous else None
        scope = ModuleScope(phase, module, verified if before is None else verified | _nodes_by_name(before), handed_on)
        is_verified = previous is not None and module in (previous.module, before)
        for of_a_module in _OF_WHAT_PHASES_SAVE if is_verified else _OF_A_MODULE:
            _raise_first(of_a_module(scope), of_a_module.__name__, f"pass {after}, {phase} graph")
        # The nodes of a phase are those of the joint graph, which are already verified.
        verified = verified | _nodes_by_name(module)
        handed_on |= {role.name for _, role in outputs_of(module) if isinstance(role, Saved)}
    for against_the_captured in _AGAINST_THE_CAPTURED:
        _raise_first(against_the_captured(graph, captured or graph), against_the_captured.__name__, f"pass {after}")
    of_windows = WINDOW_INVARIANTS if graph.varied is not None or overlaps_steps(graph) else ()
    for of_the_graph in (*_OF_THE_GRAPH, *of_windows):
        _raise_first(of_the_graph(graph), of_the_graph.__name__, f"pass {after}")


# ---- invariants of one module ----


@dataclass(frozen=True)
class ModuleScope:
    """A graph module to verify, and what earlier checks have found.

    Attributes:
        phase: name of the phase that the module computes, or "joint" for the whole graph.
        verified: name -> node of that name in a module verified earlier, whose value is known to be correct.
        handed_on: names of the values that earlier phases save.
    """

    phase: str
    module: fx.GraphModule
    verified: Mapping[str, fx.Node]
    handed_on: frozenset[str]


def definitions_before_uses(scope: ModuleScope) -> Iterator[Violation]:
    """Checks that every input of a node is an earlier node of the module, that no two nodes have the same name, and
    that the last node is the only output.
    """
    defined: set[fx.Node] = set()
    names: set[str] = set()
    nodes = list(scope.module.graph.nodes)
    for node in nodes:
        for value in node.all_input_nodes:
            if value not in defined:
                found = "a node of another graph" if value.graph is not node.graph else "one defined later, or erased"
                yield Violation(node, f"input {value.name} to be defined before its use", found, "move it up")
        if node.name in names:
            yield Violation(node, "a name of its own", "that of another node", "let the Rewriter name it")
        defined.add(node)
        names.add(node.name)
    outputs = [node for node in nodes if node.op == "output"]
    if len(outputs) != 1 or nodes[-1].op != "output":
        found = f"{len(outputs)} of {len(nodes)} nodes"
        yield Violation(None, "one output node, the last of all", found, "end the graph in its output")


def known_targets(scope: ModuleScope) -> Iterator[Violation]:
    """Checks that the module's nodes call only dispatcher ops, `getitem` and arithmetic on numbers. Other Python
    functions could have any effect.
    """
    for node in scope.module.graph.nodes:
        if node.op not in {"placeholder", "get_attr", "call_function", "output"}:
            yield Violation(node, "placeholder, get_attr, call_function or output", node.op, "inline the call")
        elif node.op != "call_function" or isinstance(node.target, OpOverload) or node.target is operator.getitem:
            continue
        elif node.target not in _SYM_OPS or isinstance(node.meta.get("val"), Tensor):
            found = f"Python function {getattr(node.target, '__name__', node.target)}"
            remedy = "call an overload of torch.ops, declared with torch.library where torch has none"
            yield Violation(node, "a dispatcher op, getitem, or arithmetic on numbers", found, remedy)


def launches_and_waits_paired(scope: ModuleScope) -> Iterator[Violation]:
    """Checks that each launch of a collective in the module has exactly one wait, and each wait a launch."""
    for node in scope.module.graph.nodes:
        if is_launch(node):
            waits = [user.name for user in node.users if is_wait(user)]
            if len(waits) != 1:
                remedy = "let all readers share one wait" if waits else "insert a wait_tensor before the first reader"
                yield Violation(node, "exactly one wait_tensor for this launch", f"{waits or 'none'}", remedy)
        elif is_wait(node) and not is_launch(node.args[0]):
            remedy = "remove the wait, or wait for the launch itself"
            yield Violation(node, f"a launch to wait for, one of {sorted(LAUNCHES)}", f"{node.args[0]}", remedy)


def in_flight_values_unread(scope: ModuleScope) -> Iterator[Violation]:
    """Checks that nothing reads a collective's result before its wait, and that nothing else reads a buffer after its
    in-place reduction starts.

    A node that reads the buffer after the wait is also wrong, because no edge of the graph makes it run after the wait.
    """
    for launch in filter(is_launch, scope.module.graph.nodes):
        for reader in launch.users:
            if not is_wait(reader):
                remedy = "read the value of its wait_tensor"
                yield Violation(reader, f"no reader of {launch.name} in flight, but for its wait", "this one", remedy)
    yield from _shared_buffers(scope.module)


def values_agree(scope: ModuleScope) -> Iterator[Violation]:
    """Checks that `meta["val"]` of every node agrees with its op's result for the inputs' values in dtype, device and
    shape.

    Data-dependent sizes get fresh symbols each time they are derived, so they need to agree only up to a one-to-one
    renaming.
    """
    mode = fake_mode_of(scope.module.graph) or FakeTensorMode()
    remedy = "compute the value by running the op on its inputs' values under the graph's fake mode"
    changed = [
        node for node in scope.module.graph.nodes if not (is_derived(node) or is_unchanged(node, scope.verified))
    ]
    # Collect all results before yielding, because a caller that stops iterating would leave the mode active.
    with without_recording(mode):
        found = {node: find_disagreement(node, scope.module, mode) for node in changed}
    yield from (Violation(node, *pair, remedy) for node, pair in found.items() if pair is not None)


def values_have_roles(scope: ModuleScope) -> Iterator[Violation]:
    """Checks that every input and output of the module has a role, which says what it is, such as a parameter or a
    gradient.

    No two inputs have the same role. Each value that the module reads from an earlier phase must be saved by one.
    """
    seen: dict[InputRole, fx.Node] = {}
    for node in scope.module.graph.nodes:
        if node.op != "placeholder":
            continue
        role = node.meta.get("role")
        if not isinstance(role, InputRole):
            yield Violation(node, 'an input role in meta["role"]', f"{role}", "set the role where the input is made")
        elif role in seen:
            yield Violation(node, f"one placeholder for {role}", f"{seen[role].name} too", "read the first one")
        elif isinstance(role, Saved) and role.name not in scope.handed_on:
            found = f"only {sorted(scope.handed_on)}"
            yield Violation(node, f"an earlier phase that saves {role.name}", found, "save it in the phase that has it")
        seen[role] = node
    output = scope.module.graph.output_node()
    values, roles = output.args[0], output.meta.get("roles", ())
    if not isinstance(values, list | tuple) or len(values) != len(roles):
        remedy = "change outputs with embrace_fx.vocabulary.graph.set_outputs"
        yield Violation(output, "a tuple of values, a role for each", f"{values} and {roles}", remedy)
        return
    for value, role in zip(values, roles, strict=True):
        exists = isinstance(value, fx.Node) or (value is None and isinstance(role, Gradient))
        if not isinstance(role, OutputRole) or not exists:
            yield Violation(output, "a node and its output role", f"{value} and {role}", "leave out what has no value")


def forward_free_of_tangents(scope: ModuleScope) -> Iterator[Violation]:
    """Checks that no result, mutation or forward node depends on a tangent."""
    for node, input_role in inputs_of(scope.module):
        if isinstance(input_role, Tangent) and scope.phase not in {"joint", "backward"}:
            yield Violation(node, f"no tangent in the {scope.phase} phase", "one", "move its readers to the backward")
    late = after_tangents(scope.module)
    for value, role in outputs_of(scope.module):
        if value in late and isinstance(role, Result | Mutation):
            yield Violation(value, f"{role} without tangents", "one among its inputs", "read the forward's own value")


# ---- invariants of the whole graph ----


_OF_A_MODULE: tuple[Callable[[ModuleScope], Iterator[Violation]], ...] = (
    definitions_before_uses,
    known_targets,
    values_have_roles,
    launches_and_waits_paired,
    in_flight_values_unread,
    forward_free_of_tangents,
    values_agree,
)

_OF_WHAT_PHASES_SAVE: tuple[Callable[[ModuleScope], Iterator[Violation]], ...] = (values_have_roles,)
"""The invariants of a module that depend on other modules."""

_AGAINST_THE_CAPTURED: tuple[Callable[[TrainingGraph, TrainingGraph], Iterator[Violation]], ...] = (
    parameters_updated_once,
    forward_kept,
)

_OF_THE_GRAPH: tuple[Callable[[TrainingGraph], Iterator[Violation]], ...] = (
    collectives_in_one_order,
    copies_equal_originals,
    replays_draw_equally,
    copies_in_pairs,
    freed_values_unread,
    within_memory_limit,
)

INVARIANTS = (*_OF_A_MODULE, *_AGAINST_THE_CAPTURED, *_OF_THE_GRAPH)


# ---- reporting violations ----


def _raise_first(violations: Iterator[Violation], invariant: str, where: str) -> None:
    """Raises the first violation as an error, if there is one. The message names the invariant and `where` it is
    broken.
    """
    for v in violations:
        # `dict.fromkeys` removes duplicates: without a source line, `source_of` returns the node's name.
        places = [where, *([] if v.node is None else dict.fromkeys((f"node {v.node.name}", source_of(v.node))))]
        raise VerificationError(
            f"{invariant}: expected {v.expected}, but found {v.found} (in {', '.join(places)}). To fix it: {v.remedy}."
        )


# ---- reading graphs ----


def _nodes_by_name(module: fx.GraphModule) -> dict[str, fx.Node]:
    """Returns the nodes of a module by name."""
    return {node.name: node for node in module.graph.nodes}


# ---- buffers ----


def _shared_buffers(module: fx.GraphModule) -> Iterator[Violation]:
    """Yields a violation for each buffer that a node reads while an in-place collective may write it."""
    in_place = ("_c10d_functional::all_reduce_", "embrace::exchange_gradient_", "embrace::submit_chunk")
    launches = {node: None for node in module.graph.nodes if op_name(node) in in_place}
    if not launches:
        return
    buffers: dict[fx.Node, set[fx.Node]] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}  # buffer -> its readers in the order of the graph
    for node in module.graph.nodes:
        # A launch's result counts as a new buffer, because readers of its wait may read the reduced value.
        aliased = [] if node in launches else aliased_inputs(node)
        buffers[node] = set().union(*(buffers[value] for value in aliased)) or {node}
        for buffer in set().union(*(buffers[value] for value in node.all_input_nodes)):
            readers.setdefault(buffer, []).append(node)
    for launch in launches:
        (reduced,) = launch.all_input_nodes
        for buffer in sorted(buffers[reduced]):
            if buffer.op in {"placeholder", "get_attr"}:
                yield Violation(launch, "a buffer of its own to reduce in place", f"{buffer.name}", "reduce a copy")
            for node in readers[buffer]:
                if launch < node:
                    expected = f"no reader of the memory that {launch.name} reduces in place, from its launch on"
                    yield Violation(node, expected, "this one", "read the value of its wait_tensor, or reduce a copy")
