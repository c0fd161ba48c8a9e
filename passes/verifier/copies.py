"""Invariants of values that are offloaded and reloaded, and of a step's peak memory (`passes/memory`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from embrace_fx.passes.collectives import running_modules
from embrace_fx.passes.memory.offload import view_of
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.passes.verifier.violation import Violation
from embrace_fx.vocabulary.copy_ops import AWAIT_OFFLOAD, AWAIT_RELOAD, COPY_OPS, OFFLOAD, RELOAD
from embrace_fx.vocabulary.graph import Saved, TrainingGraph, inputs_of
from embrace_fx.vocabulary.ops import launch_of, op_name

_READERS = {OFFLOAD: AWAIT_OFFLOAD, AWAIT_OFFLOAD: RELOAD, RELOAD: AWAIT_RELOAD}
"""Op -> the only op that may read its result."""


def copies_in_pairs(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that each offloaded value is copied to the host, awaited, copied back and awaited, each once and in this
    order.

    No other node may read the result of one of these four nodes. The start and the wait of a copy must both have the
    copy's id, also as their last argument.
    """
    nodes = [node for module in running_modules(graph) for node in module.graph.nodes]
    copying = [node for node in nodes if op_name(node) in COPY_OPS]
    times = Counter(str(launch_of(node)) for node in copying if op_name(node) in (OFFLOAD, RELOAD))
    of_saved = {node.meta["role"].name: node for node in nodes if isinstance(node.meta.get("role"), Saved)}
    for node in copying:
        name = op_name(node)
        launch = launch_of(node)
        if launch is None or node.args[-1] != str(launch) or times[str(launch)] != 1:
            found = f"{node.args[-1]!r}, begun {times[str(launch)]} times"
            yield Violation(node, f"the id of its copy, {launch}, which is begun once", found, "give each copy its id")
        users = [*node.users, *(of_saved[node.name].users if node.name in of_saved else ())]
        users = [user for user in users if user.op != "output"]
        if name in _READERS and [op_name(user) for user in users] != [_READERS[name]]:
            readers = ", ".join(user.name for user in users) or "nobody"
            remedy = "read what its reload's await yields"
            yield Violation(node, f"{node.name} read by one {_READERS[name]}", f"read by {readers}", remedy)
        if name in (AWAIT_OFFLOAD, AWAIT_RELOAD) and launch_of(node.all_input_nodes[0]) != launch:
            found = f"{launch_of(node.all_input_nodes[0])}"
            yield Violation(node, f"an await of '{launch}' where it is read", found, "await what has been begun")


def freed_values_unread(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that no node reads an offloaded value, or a view of it, after the wait for its offload."""
    if not any(op_name(node) == AWAIT_OFFLOAD for module in running_modules(graph) for node in module.graph.nodes):
        return
    freed: dict[str, str] = {}  # value -> the wait that freed it
    views: dict[str, set[str]] = {}  # value -> names of all values that share its memory
    for module in running_modules(graph):
        saved = {node: role.name for node, role in inputs_of(module) if isinstance(role, Saved)}
        for node in module.graph.nodes:
            source = view_of(node)
            if source is not None:
                of_source = views.setdefault(_saved_name(source, saved), {_saved_name(source, saved)})
                of_source.add(node.name)
                views[node.name] = of_source
            if op_name(node) == AWAIT_OFFLOAD:
                value = _saved_name(node.all_input_nodes[0].all_input_nodes[0], saved)
                freed |= dict.fromkeys(views.get(value, {value}), node.name)
            if node.op == "output":
                continue
            for read in node.all_input_nodes:
                gone = freed.get(_saved_name(read, saved))
                if gone is not None and op_name(node) != AWAIT_OFFLOAD:
                    remedy = "read it earlier, or what its reload's await yields"
                    yield Violation(node, f"{_saved_name(read, saved)} read before {gone}", "this place", remedy)
        for placeholder, name in saved.items():
            if (
                placeholder.users
                and name in freed
                and "backward" in graph.phases
                and module is graph.phases["backward"]
            ):
                yield Violation(placeholder, f"{name} to be reloaded", "saved all the same", "read what comes back")


def within_memory_limit(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that the step's peak memory is within the graph's limit. Storages whose size depends on data count as 0
    bytes.
    """
    if graph.memory_limit is None:
        return
    found = step_memory(graph)
    if found.known_peak_bytes > graph.memory_limit:
        node = found.nodes[list(found.bytes_at_node).index(found.peak_bytes)]
        remedy = "give up more, offload earlier, or reload later"
        yield Violation(node, f"at most {graph.memory_limit:,} bytes held", f"{found.known_peak_bytes:,}", remedy)


def _saved_name(node: fx.Node, saved: dict[fx.Node, str]) -> str:
    """Returns the name under which an earlier phase saved a node's value, or the node's own name."""
    return saved.get(node, node.name)
