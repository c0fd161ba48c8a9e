"""Invariants of values that the backward recomputes (`passes/memory`): they equal the forward's, bit for bit.

`node.meta["again"]` of a recomputed node is the name of the node that it is a copy of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from embrace_fx.passes.collectives import is_launch, is_wait, running_modules
from embrace_fx.passes.verifier.violation import Violation
from embrace_fx.vocabulary.copy_ops import COPY_OPS
from embrace_fx.vocabulary.graph import TrainingGraph, written_by
from embrace_fx.vocabulary.ops import AWAITS, SUBMISSIONS, device_of, draws_random_numbers, op_name

_STATE, _BEGIN, _END = "embrace::random_state", "embrace::begin_replay", "embrace::end_replay"


def copies_equal_originals(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that each node that recomputes another node calls the same op on the same values, or on recomputed copies
    of these values.

    Such a node must not launch or await a collective, and must not read state that the forward writes.
    """
    nodes = {node.name: node for node in graph.graph.nodes}
    written = written_by(graph.module)
    for node in (node for node in nodes.values() if "again" in node.meta):
        if is_launch(node) or is_wait(node) or op_name(node) in AWAITS | SUBMISSIONS:
            yield Violation(node, "communication once", f"{op_name(node)} again", "save what comes of it")
        original = nodes.get(node.meta["again"])
        expected, found = None if original is None else _comparable_call(original), _comparable_call(node)
        if expected != found:
            wanted = f"the call of {node.meta['again']}, {expected}"
            yield Violation(node, wanted, f"{found}", "copy the node, its inputs or copies of them")
        for value in node.all_input_nodes:
            if value.meta.get("role") in written:
                remedy = "read its embrace.copy_unwritten"
                yield Violation(node, f"{value.name} as the forward read it", "as the forward has written it", remedy)


def replays_draw_equally(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that recomputed random ops draw the same numbers as the original ones: in the same order, from the random
    state that was saved before the first of them.
    """
    drawn: dict[torch.device, list[str]] = {}
    states: dict[str, tuple[torch.device, int]] = {}  # random state -> (its device, the number of draws before it)
    replays: dict[torch.device, _Replay] = {}
    for node in (node for module in running_modules(graph) for node in module.graph.nodes):
        name = op_name(node)
        if name == _STATE:
            (device,) = node.args
            states[node.name] = (device, len(drawn.get(device, [])))
        elif name == _BEGIN:
            state, device = node.args
            if device in replays or states.get(state.name, (None, 0))[0] != device:
                found = "one within another" if device in replays else f"{state.name}"
                yield Violation(node, f"a state of {device}, and no replay there", found, "end the one before")
                return
            replays[device] = _Replay(node.name, states[state.name][1])
        elif name == _END:
            now, device = node.args
            replay = replays.pop(device, None)
            if replay is None or replay.begin != now.name:
                yield Violation(node, f"the replay that {now.name} begins", f"{replay}", "end each replay once")
                return
            earlier = drawn.get(device, [])[replay.after : replay.after + len(replay.draws)]
            if earlier != replay.draws:
                remedy = "draw again all that was drawn from that state on, in that order"
                yield Violation(node, f"draws of {', '.join(earlier)}", f"{', '.join(replay.draws)}", remedy)
        elif draws_random_numbers(node):
            device = device_of(node)
            if device in replays:
                replays[device].draws.append(node.meta.get("again", node.name))
            elif "again" in node.meta:
                yield Violation(node, "a draw within a replay", "one outside of all", "begin a replay before it")
            else:
                drawn.setdefault(device, []).append(node.name)
    for replay in replays.values():
        yield Violation(None, f"an end of {replay.begin}", "none", "end each replay once")


@dataclass
class _Replay:
    """A sequence of nodes that repeat earlier draws of random numbers on one device.

    Attributes:
        begin: name of the node that begins it.
        after: the number of original draws on the device before the repeated ones.
        draws: names of the original draws repeated so far.
    """

    begin: str
    after: int
    draws: list[str] = field(default_factory=list)


def _comparable_call(node: fx.Node) -> tuple[Any, ...]:
    """Returns a node's op and arguments in a form that is equal for an original node and one that recomputes it."""
    leaves, spec = pytree.tree_flatten((node.args, dict(node.kwargs)))
    return str(node.target), str(spec), [_origin(leaf) if isinstance(leaf, fx.Node) else str(leaf) for leaf in leaves]


def _origin(node: fx.Node) -> str:
    """Returns the name of the node whose value `node` copies or recomputes, or its own name if it does neither."""
    if op_name(node) == "embrace::copy_unwritten":
        node = node.all_input_nodes[0]
    while op_name(node) in COPY_OPS:  # an offloaded and reloaded value counts as the value itself
        node = node.all_input_nodes[0]
    return str(node.meta.get("again", node.name))
