"""Describes the collectives that a graph launches. Two ranks' descriptions are equal if and only if their collectives
match.

Launches that differ between ranks, or have another order, hang or mix up values. Every rank compiles separately, so
each hashes its launches, and the hashes are compared before the first collective of training.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from torch._ops import OpOverload
from torch.fx.node import Argument

from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import LAUNCHES, launch_of, op_name
from embrace_fx.vocabulary.submissions import is_submission

EQUAL_SHAPES: frozenset[str] = frozenset(
    {"_c10d_functional::all_reduce", "_c10d_functional::all_reduce_", "embrace::exchange_gradient_"}
)
"""The launches whose shape must be equal on all ranks. The sizes of other launches depend on each rank's batch."""

_GROUP_ARGUMENTS = frozenset({"group", "group_name"})


@dataclass(frozen=True)
class Collective:
    """One launch of a collective, described by everything that must be equal on all ranks.

    Attributes:
        group: the process group's purpose, such as "embedding" or "dense".
        op: the op's name, "namespace::name" without overload.
        id: the id of the launch as text, or "" if it has none.
        serves: the tables or parameters whose ids or gradients are packed into one launch, in order.
        options: other arguments of the op that are not tensors: (name, value as text).
        dtype: the dtype of the launch's result.
        shape: the shape of a tensor that is reduced or exchanged as a whole, or None if the size depends on the batch.
    """

    group: str
    op: str
    id: str
    serves: tuple[str, ...]
    options: tuple[tuple[str, str], ...]
    dtype: str
    shape: tuple[str, ...] | None


def collective_sequence(graph: TrainingGraph) -> tuple[Collective, ...]:
    """Describes every collective that a graph launches, in execution order.

    `graph` must be legal (`embrace_fx.passes.verifier.invariants`).
    """
    return tuple(
        _describe_launch(node) for module in running_modules(graph) for node in module.graph.nodes if is_launch(node)
    )


def sequence_hash(graph: TrainingGraph, *, ordered: bool = True) -> str:
    """Returns the SHA-256 hash, in hexadecimal, of the graph's `collective_sequence`, for comparison between ranks.

    The hash does not depend on node names, the batch's sizes or the process.

    Args:
        ordered: whether collectives run in the graph's order. If False, a launcher orders the collectives by the plan,
            so they are hashed in the order of their ids and without their tables.
    """
    sequence = collective_sequence(graph)
    if not ordered:
        named = (replace(each, serves=()) for each in sequence if each.id)
        sequence = (*sorted(named, key=lambda each: each.id), *(each for each in sequence if not each.id))
    return hashlib.sha256("\n".join(map(repr, sequence)).encode()).hexdigest()


def _describe_launch(launch: fx.Node) -> Collective:
    """Describes the collective that a node launches."""
    options = sorted(launch_options(launch).items())
    value = launch.meta["val"]
    return Collective(
        group=group_of(launch),
        op=op_name(launch),
        id=str(launch_of(launch)) if is_submission(launch) else "",
        serves=launch.meta.get("tables") or launch.meta.get("parameters", ()),
        options=tuple((name, repr(option)) for name, option in options if name not in _GROUP_ARGUMENTS),
        dtype=str(value.dtype),
        shape=tuple(map(str, value.shape)) if op_name(launch) in EQUAL_SHAPES else None,
    )


def group_of(launch: fx.Node) -> str:
    """Returns the purpose of the process group that a collective uses, such as "embedding" or "dense"."""
    return next(str(value) for name, value in launch_options(launch).items() if name in _GROUP_ARGUMENTS)


def launch_options(launch: fx.Node) -> dict[str, Any]:
    """Returns, by name, the arguments of a collective's op that are not tensors. Arguments left at their defaults are
    not included.
    """
    assert isinstance(launch.target, OpOverload)
    tensors = {a.name for a in launch.target._schema.arguments if "Tensor" in str(a.type)}
    return {name: value for name, value in _arguments(launch).items() if name not in tensors}


# ---- reading graphs ----


def running_modules(graph: TrainingGraph) -> Iterable[fx.GraphModule]:
    """Returns the modules that run in a step: the phases in order, or the joint module if the graph is not
    partitioned.
    """
    return graph.phases.values() or (graph.module,)


def is_launch(node: Argument) -> bool:
    """Returns whether a node starts a collective, without waiting for it."""
    return isinstance(node, fx.Node) and op_name(node) in LAUNCHES


def is_wait(node: fx.Node) -> bool:
    """Returns whether a node waits for a collective that another node has started, by `wait_tensor`."""
    return op_name(node) == "_c10d_functional::wait_tensor"


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs whose memory a node's result may share: the source of a view, an input that the node writes in
    place, or the collective that the node waits for.
    """
    if node.target is operator.getitem:  # an item of a list of views is a view; other items are separate results
        return aliased_inputs(node.all_input_nodes[0])
    if is_wait(node):
        return node.all_input_nodes
    if not isinstance(node.target, OpOverload):
        return []
    shared: list[fx.Node] = []
    for position, name in _shared_arguments(node.target):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(name)
        values = value if isinstance(value, list | tuple) else (value,)
        shared += [each for each in values if isinstance(each, fx.Node)]
    return shared


@functools.cache
def _shared_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Returns (position, name) of each argument of an op (tensor or list of tensors) whose memory the op's results may
    share.
    """
    schema = op._schema
    if all(result.alias_info is None for result in schema.returns):
        return ()
    return tuple((k, argument.name) for k, argument in enumerate(schema.arguments) if argument.alias_info is not None)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Returns the arguments of an op's call by name, without those left at their defaults."""
    assert isinstance(node.target, OpOverload)
    names = (argument.name for argument in node.target._schema.arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}
