"""Invariants of communication that overlaps the next step, over two windows: a backward and the forward after it.

Contract
    Each is a function of a graph's phases, which are the same under any schedule. A launch is awaited in the window of
    its submission or (delayed gradients, ids) in the window after it, so that what holds from one window to the next
    holds for all.

`blocked` checks what only a schedule decides: that no await waits for ever behind the launch order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from embrace_fx.passes.verifier.violation import Violation
from embrace_fx.vocabulary.graph import Parameter, PendingGradients, PendingRows, TrainingGraph, inputs_of, outputs_of
from embrace_fx.vocabulary.operation_id import IDS, OperationId, bucket_name
from embrace_fx.vocabulary.ops import AWAITS, SUBMISSIONS, launch_of, op_name
from embrace_fx.vocabulary.submissions import awaited, is_submission, overlaps_steps, submitted


@dataclass
class _Places:
    """The submissions and awaits of a launch, with their places in the window."""

    submitted: list[tuple[int, fx.Node]] = field(default_factory=list)
    awaited: list[tuple[int, fx.Node]] = field(default_factory=list)


def window(graph: TrainingGraph) -> list[fx.Node]:
    """Lists the nodes of a window: a backward, and the forward after it."""
    return [node for phase in ("backward", "forward") for node in graph.phases[phase].graph.nodes]


def _is_steady(graph: TrainingGraph) -> bool:
    """Tells whether windows of an overlapped graph repeat; a graph with a variant's phase runs only once in between."""
    return graph.varied is None and overlaps_steps(graph)


def _places(graph: TrainingGraph) -> dict[OperationId, _Places]:
    found: dict[OperationId, _Places] = defaultdict(_Places)
    for place, node in enumerate(window(graph)):
        if is_submission(node):
            found[_id(node)].submitted.append((place, node))
        if (launch := awaited(node)) is not None:
            found[launch].awaited.append((place, node))
    return found


def _id(node: fx.Node) -> OperationId:
    launch = launch_of(node)
    assert launch is not None
    return launch


def _crosses(launch: OperationId) -> bool:
    """Tells whether a launch is awaited in the window after that of its submission."""
    return launch == IDS or launch.part == "delayed"


# ---- launches ----


def handed_over_once(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """An overlapped graph has each exchange of the joint graph: as itself, as a submission, or as an await.

    A stack's exchange counts for each of its tables. Early and delayed parts, and further chunks, are not counted.
    """
    if not overlaps_steps(graph):
        return
    before = Counter(op_name(node) for node in graph.module.graph.nodes)
    after: Counter[str] = Counter()
    for module in graph.phases.values():
        of_submitted = {value: role for value, role in outputs_of(module) if isinstance(role, PendingRows)}
        for node in module.graph.nodes:
            launch = launch_of(node)
            if launch is not None and (launch.part == "delayed" or launch.number > 0):
                continue
            stacked = [len(user.args[1]) for user in node.users if op_name(user) == "embrace::unstack_rows"]
            tables = len(of_submitted[node].tables) if node in of_submitted else sum(stacked) or 1
            after[op_name(node)] += tables
    for handed, launches in _HANDED_OVER.items():
        expected_count, left = (sum(counts[launch] for launch in launches) for counts in (before, after))
        if expected_count != left + after[handed]:
            found = f"{left} and {after[handed]}"
            expected = f"{expected_count} x {' or '.join(launches)} or {handed} in the phases"
            yield Violation(None, expected, found, "hand each exchange over once")


_HANDED_OVER = {
    "embrace::submit_chunk": ("_c10d_functional::all_reduce_", "embrace::exchange_gradient_"),
    "embrace::submit_gradients": ("embrace::all_to_all_gradients",),
    "embrace::join_rows": ("embrace::all_to_all_rows",),
}
"""Op of an overlapped graph -> the exchange of the joint graph that it stands for."""


def launches_told(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """Every submission and every await has the id of its launch, and prints it."""
    for node in window(graph) if overlaps_steps(graph) else ():
        if op_name(node) in SUBMISSIONS | AWAITS and str(launch_of(node)) != node.args[-1]:
            remedy = "make the node with embrace_fx.passes.overlap.launches.launch_node"
            yield Violation(node, f"the id of its launch, {launch_of(node)}", f"{node.args[-1]!r}", remedy)


def submitted_and_awaited_once(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """Each launch of a window has one submission and one await: no deadlock, and no update twice."""
    if not _is_steady(graph):
        return
    for launch, places in _places(graph).items():
        for what, nodes in (("submission", places.submitted), ("await", places.awaited)):
            if len(nodes) != 1:
                found = f"{len(nodes)}: {', '.join(node.name for _, node in nodes) or 'none'}"
                remedy = "submit what is awaited, and await what is submitted"
                yield Violation(nodes[-1][1] if nodes else None, f"one {what} of '{launch}' in a window", found, remedy)


def awaited_after_submitted(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """An await follows its submission: in the same window, or in the window after it."""
    for launch, places in _places(graph).items() if _is_steady(graph) else ():
        if len(places.submitted) != 1 or len(places.awaited) != 1:
            continue  # `submitted_and_awaited_once` reports it
        (submission, _), (end, node) = places.submitted[0], places.awaited[0]
        if _crosses(launch) != (end < submission):
            where = (
                "the window after that of its submission" if _crosses(launch) else "its window, after its submission"
            )
            yield Violation(node, f"'{launch}' to be awaited in {where}", "this place", "move the await")


# ---- rows ----


def rows_current(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """Rows are looked up after their last update, and no update follows the lookup in its phase.

    Early rows of the next batch are not among this batch's rows, but may be among the delayed rows of the step before.
    Late rows, and all rows where nothing is split, are among the rows with prior gradients.
    """
    if not _is_steady(graph):
        return
    gradients = [launch for launch in _submitted(graph) if launch.kind in ("gradients", "delayed")]
    for phase in ("backward", "forward"):
        looked_up: set[str] = set()
        for node in graph.phases[phase].graph.nodes:
            launch = launch_of(node)
            if launch is None:
                continue
            if op_name(node) == "embrace::update_rows" and launch.what in looked_up:
                remedy = "move the update before the lookup"
                yield Violation(node, f"no update of {launch.what} after the lookup in the {phase}", "this one", remedy)
            if op_name(node) != "embrace::submit_rows":
                continue
            looked_up.add(launch.what)
            applied = set(_updates_behind(node.args[0]))
            delayed = launch.part == "early"
            needed = {g for g in gradients if g.what == launch.what and (g.part == "delayed") == delayed}
            if missing := sorted(needed - applied):
                expected = f"'{launch}' to be looked up after the update by {', '.join(f'{m!s}' for m in missing)}"
                yield Violation(node, expected, "a shard without it", "read the result of that update_rows")


def _updates_behind(value: object) -> Iterator[OperationId]:
    while isinstance(value, fx.Node) and op_name(value) == "embrace::update_rows":
        yield _id(value)
        value = value.args[0]


def rows_joined(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """A forward joins all parts of a table's rows that were sent."""
    sent = [launch for launch in _submitted(graph) if launch.kind == "lookups"] if _is_steady(graph) else []
    for node in graph.phases["forward"].graph.nodes if _is_steady(graph) else ():
        if op_name(node) != "embrace::join_rows":
            continue
        table = node.args[3]
        parts = {launch for value in node.all_input_nodes if (launch := awaited(value)) is not None}
        expected = {launch for launch in sent if launch.what == table}
        if parts != expected:
            names = [", ".join(sorted(map(str, each))) or "none" for each in (expected, parts)]
            yield Violation(node, f"the parts {names[0]} of {table}", names[1], "await and join every part")


def gradients_cut_once(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """A table's gradient travels whole, or as prior and all pieces of delayed gradients: each row once."""
    by_table: dict[str, list[OperationId]] = defaultdict(list)
    for launch in _submitted(graph) if _is_steady(graph) else ():
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


def _submitted(graph: TrainingGraph) -> list[OperationId]:
    return [*submitted(graph.phases["backward"], graph.phases["forward"])]


# ---- buckets ----


def chunks_cover(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """The chunks of a bucket cover each of its elements once."""
    chunks: dict[str, list[fx.Node]] = defaultdict(list)
    for node in window(graph) if overlaps_steps(graph) else ():
        if op_name(node) == "embrace::submit_chunk":
            chunks[_id(node).what].append(node)
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


def chunks_unread_in_flight(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """No node reads a bucket between the submission of a chunk and its await; a bucket is handed over complete."""
    if not overlaps_steps(graph):
        return
    flying: dict[fx.Node, frozenset[OperationId]] = {}
    for node in graph.phases["backward"].graph.nodes:
        above = frozenset[OperationId]().union(*(flying.get(value, frozenset()) for value in node.all_input_nodes))
        match op_name(node):
            case "embrace::submit_chunk":
                flying[node] = above | {_id(node)}
            case "embrace::await_chunk":
                flying[node] = above - {_id(node)}
            case "embrace::hand_over":
                name = bucket_name(int(str(node.args[1])))
                missing = {launch for launch in _submitted(graph) if launch.what == name} - above
                if missing:
                    expected = f"a bucket all of whose chunks are submitted, {', '.join(map(str, sorted(missing)))} too"
                    yield Violation(node, expected, "one that is not", "hand over the result of its last submission")
            case _ if above:
                expected = f"no reader before the await of {', '.join(map(str, sorted(above)))}"
                yield Violation(node, expected, "this one", "read what await_chunk yields")


def parameters_current(graph: TrainingGraph, captured: TrainingGraph) -> Iterator[Violation]:
    """A parameter that the next forward updates is read there after its update, which follows all chunks' awaits."""
    if not overlaps_steps(graph):
        return
    forward = graph.phases["forward"]
    parameters = {role.name: node for node, role in inputs_of(forward) if isinstance(role, Parameter)}
    sent = _submitted(graph)
    for _, role in outputs_of(graph.phases["backward"]):
        if not isinstance(role, PendingGradients):
            continue
        bucket = bucket_name(role.bucket)
        updates = [
            n for n in forward.graph.nodes if op_name(n) == "embrace::update_bucket" and n.args[1] == role.bucket
        ]
        if len(updates) > 1:
            yield Violation(updates[1], f"one update of {bucket}", f"{len(updates)}", "let all readers share one")
        for update in updates:
            missing = {launch for launch in sent if launch.what == bucket} - set(_chunks_behind(update))
            if missing:
                expected = f"{bucket} to be updated after {', '.join(map(str, sorted(missing)))} has arrived"
                yield Violation(update, expected, "no await of it before", "await every chunk")
        for name in role.parameters:
            for reader in parameters[name].users if name in parameters else ():
                launch = launch_of(reader)
                if reader not in updates and (launch is None or launch.what != bucket):
                    expected = f"{name} to be read after the update of {bucket}"
                    yield Violation(reader, expected, "the parameter before it", "read what update_bucket yields")


def _chunks_behind(update: fx.Node) -> Iterator[OperationId]:
    for value in update.all_input_nodes:
        node = value
        while op_name(node) == "embrace::await_chunk":
            yield _id(node)
            node = node.all_input_nodes[0]


INVARIANTS = (
    handed_over_once,
    launches_told,
    submitted_and_awaited_once,
    awaited_after_submitted,
    rows_current,
    rows_joined,
    gradients_cut_once,
    chunks_cover,
    chunks_unread_in_flight,
    parameters_current,
)
"""Checked in this order: an invariant may rely on those before it."""


# ---- a launch order ----


def blocked(graph: TrainingGraph, order: Sequence[OperationId]) -> str | None:
    """Names the reason why steps would deadlock under a launch order; None: they would not.

    Launches leave strictly in the order, window after window, each once it is submitted; the program waits at an await
    until that launch has left. Two windows are simulated: the second begins with the first one's launches in flight.
    """
    places = _places(graph)
    submitted = {launch for launch, each in places.items() if each.submitted}
    if set(order) != submitted or len(order) != len(submitted):
        odd = sorted(map(str, submitted.symmetric_difference(order))) or ["one of them twice"]
        return f"expected a launch order of what the graph submits, each once, found a difference in {', '.join(odd)}"
    line = [(number, launch) for number in range(2) for launch in order]
    turn = {each: k for k, each in enumerate(line)}
    left, waiting = 0, set[tuple[int, OperationId]]()
    for number in range(2):
        for node in window(graph):
            if is_submission(node) and _id(node) in submitted:
                waiting.add((number, _id(node)))
                while left < len(line) and line[left] in waiting:
                    left += 1
            launch = awaited(node)
            if launch is None or launch not in submitted:
                continue
            each = (number - _crosses(launch), launch)
            if each[0] >= 0 and turn[each] >= left:
                head = line[left][1]
                return (
                    f"expected '{launch}' to have left before node {node.name} waits for it, found that '{head}' is to "
                    "leave first and is still to be submitted: all ranks would wait for ever. Launch it later"
                )
    return None


def held_bytes(graph: TrainingGraph, sent_bytes: Mapping[OperationId, int]) -> int:
    """Returns the most bytes in flight, from submission to await, at any place of the program, over two windows.

    Args:
        sent_bytes: launch -> bytes that one rank sends.
    """
    held = most = 0
    on_the_way: set[tuple[int, OperationId]] = set()
    for number in range(2):
        for node in window(graph):
            if is_submission(node):
                on_the_way.add((number, _id(node)))
                held += sent_bytes.get(_id(node), 0)
                most = max(most, held)
            launch = awaited(node)
            if launch is not None and (each := (number - _crosses(launch), launch)) in on_the_way:
                on_the_way.remove(each)
                held -= sent_bytes.get(launch, 0)
    return most


def check_launches(
    graph: TrainingGraph, order: Sequence[OperationId], sent_bytes: Mapping[OperationId, int], bound_bytes: int
) -> None:
    """Raises where the steps of a graph would deadlock under a launch order, or have too many bytes in flight.

    Raises:
        ValueError: names the await that would never end, or the bytes that would be in flight.
    """
    if (reason := blocked(graph, order)) is not None:
        raise ValueError(f"{reason}.")
    if (held := held_bytes(graph, sent_bytes)) > bound_bytes:
        raise ValueError(
            f"expected at most {bound_bytes:,} bytes on their way at once, found {held:,} between submission and "
            "await. Await earlier, or send in smaller pieces."
        )
