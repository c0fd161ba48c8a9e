"""Invariants of communication that overlaps the next step, over windows of a backward and the next forward.

Contract
    Each is a function of the phases of a graph with overlapped communication, under any schedule. An invariant that
    holds from one window, a backward and the next forward, to the next holds for all.

`find_deadlock` checks a property of the schedule: that no await waits forever because of the launch order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from torch import fx

from embrace_fx.passes.verifier.under_way import crosses_windows, launches_in_flight_agree, window_nodes
from embrace_fx.passes.verifier.violation import Violation
from embrace_fx.vocabulary.graph import PendingGradients, TrainingGraph, outputs_of, parameters_of
from embrace_fx.vocabulary.operation_id import OperationId, bucket_name
from embrace_fx.vocabulary.ops import AWAITS, SUBMISSIONS, id_of, launch_of, op_name
from embrace_fx.vocabulary.submissions import awaited, is_submission, submitted

# ---- launches ----


def exchanged_once(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that each exchange of the joint (forward and backward) graph occurs once in the graph that overlaps
    communication.

    An exchange that is split into parts or chunks is counted once.
    """
    before = Counter(op_name(node) for node in graph.module.graph.nodes)
    after = Counter(op_name(node) for module in graph.phases.values() for node in module.graph.nodes if _is_first(node))
    for handed, launches in _HANDED_OVER.items():
        expected_count, left = (sum(counts[launch] for launch in launches) for counts in (before, after))
        if expected_count != left + after[handed]:
            found = f"{left} and {after[handed]}"
            expected = f"{expected_count} x {' or '.join(launches)} or {handed} in the phases"
            yield Violation(None, expected, found, "hand each exchange over once")


def _is_first(node: fx.Node) -> bool:
    """Returns whether a node does not launch a delayed part or a later chunk of an exchange."""
    launch = launch_of(node)
    return launch is None or (launch.part != "delayed" and launch.number == 0)


_HANDED_OVER = {
    "embrace::submit_chunk": ("_c10d_functional::all_reduce_", "embrace::exchange_gradient_"),
    "embrace::submit_gradients": ("embrace::all_to_all_gradients",),
    "embrace::join_rows": ("embrace::all_to_all_rows",),
}
"""Op of an overlapped graph -> the corresponding exchange of the joint graph."""


def launches_identified(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that the last argument of each submission and each await is the id of its collective."""
    launching = [node for node in window_nodes(graph) if op_name(node) in SUBMISSIONS | AWAITS]
    for node in [node for node in launching if str(launch_of(node)) != node.args[-1]]:
        remedy = "make the node with embrace_fx.passes.rewriter.Rewriter.launch"
        yield Violation(node, f"the id of its launch, {launch_of(node)}", f"{node.args[-1]!r}", remedy)


# ---- rows ----


def rows_current(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that each lookup of a table's rows depends on all updates of the table that come before it in the same
    phase.
    """
    for phase in ("backward", "forward"):
        updated: dict[str, set[OperationId]] = defaultdict(set)
        for node in _calls_of(graph.phases[phase], "update_rows", "submit_rows"):
            if op_name(node) == "embrace::update_rows":
                updated[id_of(node).what].add(id_of(node))
            elif missing := sorted(updated[id_of(node).what] - set(_updates_before(node.args[0]))):
                expected = f"'{id_of(node)}' to be looked up after the update by {', '.join(map(str, missing))}"
                yield Violation(node, expected, "a shard without it", "read the result of that update_rows")


def _updates_before(value: object) -> Iterator[OperationId]:
    """Yields the ids of the row updates on which `value`, a table's shard, depends."""
    while isinstance(value, fx.Node) and op_name(value) == "embrace::update_rows":
        yield id_of(value)
        value = value.args[0]


def rows_joined(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that a forward joins all parts, such as early and late rows, in which a table's rows were sent."""
    if graph.varied is not None:
        return
    sent = [launch for launch in _submitted(graph) if launch.kind == "lookups"]
    for node in _calls_of(graph.phases["forward"], "join_rows"):
        table = node.args[3]
        parts = {launch for value in node.all_input_nodes if (launch := awaited(value)) is not None}
        expected = {launch for launch in sent if launch.what == table}
        if parts != expected:
            names = [", ".join(sorted(map(str, each))) or "none" for each in (expected, parts)]
            yield Violation(node, f"the parts {names[0]} of {table}", names[1], "await and join every part")


def gradients_cut_once(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that a table's gradient is either sent as a whole, or as one part that is sent first ("prior") and all of
    its delayed pieces.
    """
    by_table: dict[str, list[OperationId]] = defaultdict(list)
    for launch in _submitted(graph) if graph.varied is None else ():
        if launch.kind in ("gradients", "delayed"):
            by_table[launch.what].append(launch)
    for table, launches in by_table.items():
        whole = [launch for launch in launches if launch.part != "delayed"]
        pieces = sorted(launch.number for launch in launches if launch.part == "delayed")
        expected = ["prior"] if pieces else ["whole"]
        if [launch.part for launch in whole] != expected or pieces != list(range(len(pieces))):
            found = ", ".join(map(str, launches))
            remedy = "submit the whole gradient, or prior ones and every piece of the delayed ones"
            yield Violation(None, f"gradients of {table} that are cut once", found, remedy)


def _calls_of(module: fx.GraphModule, *ops: str) -> list[fx.Node]:
    """Returns the nodes of a module that call one of these ops of the package, in the order of the graph."""
    return [node for node in module.graph.nodes if op_name(node).removeprefix("embrace::") in ops]


def _submitted(graph: TrainingGraph) -> list[OperationId]:
    """Returns the ids of the collectives that one step submits."""
    return [*submitted(graph.phases["backward"], graph.phases["forward"])]


# ---- buckets ----


def chunks_cover(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that the chunks in which a bucket of gradients is reduced contain each of its elements exactly once."""
    chunks: dict[str, list[fx.Node]] = defaultdict(list)
    for node in (node for phase in graph.phases.values() for node in _calls_of(phase, "submit_chunk")):
        chunks[id_of(node).what].append(node)
    for bucket, nodes in chunks.items():
        end = 0
        for node in sorted(nodes, key=lambda each: int(str(each.args[1]))):
            start, length = int(str(node.args[1])), int(str(node.args[2]))
            if start != end:
                expected = f"a chunk of {bucket} that begins at element {end}"
                yield Violation(node, expected, f"{start}", "let each chunk begin where the one before it ends")
            end = start + length
        if end != nodes[0].meta["val"].numel():
            expected = f"chunks of all {nodes[0].meta['val'].numel()} elements of {bucket}"
            yield Violation(nodes[-1], expected, f"{end}", "send the rest too")


def chunks_unread_in_flight(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that nothing reads a bucket of gradients while one of its chunks is in flight, which is from the
    submission of the chunk to the wait for it. Also checks that all chunks of a bucket are in flight when the backward
    leaves the bucket to the next forward.
    """
    flying: dict[fx.Node, frozenset[OperationId]] = {}
    for node in graph.phases["backward"].graph.nodes:
        above = frozenset[OperationId]().union(*(flying.get(value, frozenset()) for value in node.all_input_nodes))
        match op_name(node):
            case "embrace::submit_chunk":
                flying[node] = above | {id_of(node)}
            case "embrace::await_chunk":
                flying[node] = above - {id_of(node)}
            case "embrace::defer_bucket":
                name = bucket_name(int(str(node.args[1])))
                missing = {launch for launch in _submitted(graph) if launch.what == name} - above
                if missing:
                    expected = f"a bucket all of whose chunks are submitted, {', '.join(map(str, sorted(missing)))} too"
                    yield Violation(node, expected, "one that is not", "hand over the result of its last submission")
            case _ if above:
                expected = f"no reader before the await of {', '.join(map(str, sorted(above)))}"
                yield Violation(node, expected, "this one", "read what await_chunk yields")


def parameters_current(graph: TrainingGraph) -> Iterator[Violation]:
    """Checks that the next forward reads a parameter only after its update, and updates it only after the wait for its
    gradient's chunks.
    """
    forward = graph.phases["forward"]
    parameters = parameters_of(forward)
    sent = _submitted(graph)
    for _, role in outputs_of(graph.phases["backward"]):
        if not isinstance(role, PendingGradients):
            continue
        bucket = bucket_name(role.bucket)
        updates = [node for node in _calls_of(forward, "update_bucket") if node.args[1] == role.bucket]
        if len(updates) > 1:
            yield Violation(updates[1], f"one update of {bucket}", f"{len(updates)}", "let all readers share one")
        for update in updates:
            missing = {launch for launch in sent if launch.what == bucket} - set(_awaited_chunks(update))
            if missing:
                expected = f"{bucket} to be updated after {', '.join(map(str, sorted(missing)))} has arrived"
                yield Violation(update, expected, "no await of it before", "await every chunk")
        for name in role.parameters:
            for reader in parameters[name].users if name in parameters else ():
                launch = launch_of(reader)
                if reader not in updates and (launch is None or launch.what != bucket):
                    expected = f"{name} to be read after the update of {bucket}"
                    yield Violation(reader, expected, "the parameter before it", "read what update_bucket yields")


def _awaited_chunks(update: fx.Node) -> Iterator[OperationId]:
    """Yields the ids of the gradient chunks for which a bucket's update waits."""
    for value in update.all_input_nodes:
        node = value
        while op_name(node) == "embrace::await_chunk":
            yield id_of(node)
            node = node.all_input_nodes[0]


INVARIANTS = (
    exchanged_once,
    launches_identified,
    launches_in_flight_agree,
    rows_current,
    rows_joined,
    gradients_cut_once,
    chunks_cover,
    chunks_unread_in_flight,
    parameters_current,
)
"""Checked in this order, because an invariant may rely on those before it."""


# ---- a launch order ----


def find_deadlock(graph: TrainingGraph, order: Sequence[OperationId]) -> str | None:
    """Returns the reason why steps would deadlock under a launch order, or None if they would not.

    Launches start strictly in this order, window after window, once they are submitted. The program waits at an await
    until the launch has started. Two windows are simulated: the second starts with the first one's launches in flight.
    """
    submitted = {id_of(node) for node in window_nodes(graph) if is_submission(node)}
    if set(order) != submitted or len(order) != len(submitted):
        odd = sorted(map(str, submitted.symmetric_difference(order))) or ["one of them twice"]
        return (
            f"the launch order differs from what the graph submits in {', '.join(odd)}; each launch must be in it once"
        )
    line = [(number, launch) for number in range(2) for launch in order]
    turn = {each: k for k, each in enumerate(line)}
    left, waiting = 0, set[tuple[int, OperationId]]()
    for number in range(2):
        for node in window_nodes(graph):
            if is_submission(node) and id_of(node) in submitted:
                waiting.add((number, id_of(node)))
                while left < len(line) and line[left] in waiting:
                    left += 1
            launch = awaited(node)
            if launch is None or launch not in submitted:
                continue
            each = (number - crosses_windows(launch), launch)
            if each[0] >= 0 and turn[each] >= left:
                head = line[left][1]
                return (
                    f"node {node.name} waits for '{launch}', which cannot leave before '{head}', and that is not "
                    f"submitted yet: all ranks would deadlock. Move '{launch}' before '{head}', or submit '{head}' "
                    "earlier"
                )
    return None


def check_launches(graph: TrainingGraph, order: Sequence[OperationId]) -> None:
    """Raises if the steps of a graph would deadlock under a launch order.

    Raises:
        ValueError: names the await that would never end.
    """
    if (reason := find_deadlock(graph, order)) is not None:
        raise ValueError(f"{reason}.")
