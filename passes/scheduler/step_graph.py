"""Describes one window of training, a backward and the next forward, by its compute, communication and dependences.

Contract
    Reads the phases that run: every submission and every await is a node with the id of its launch. The compute between
    them is cut into operations under the ids that the runtime's recorder uses. Every dependence follows from a node.

    backward   early rows                the rest of the step before, and the next batch's early rows
               backward <table, bucket>  ends with the submission of its gradients
               backward up to <copy>     ends where a value's reload begins or is awaited; likewise
               backward up to <exchange> ends where an exchange of an output layer begins or is awaited
               end of backward
    between    your code, optimizer step, loader: once they have been measured. Where an optimizer adds up row
               norms, it waits for the gradients, and their updates wait for the norms
    forward    update <table>            ends with the submission of its rows
               start of forward
               rows <table>, update <bucket>: follow an await; then forward <table, bucket>
               forward up to <copy>, <exchange>: as in the backward
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor, fx

from embrace_fx.cost import links as cost
from embrace_fx.cost.wire import Format, Wire
from embrace_fx.passes.node_cost import NodeMs, node_time_estimator
from embrace_fx.passes.step_memory import nbytes
from embrace_fx.vocabulary.copy_ops import RELOAD, offload_id
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import (
    BESIDE,
    BETWEEN,
    COPIES,
    EARLY,
    END,
    IDS,
    OPTIMIZER,
    ROW_NORMS,
    START,
    WHOLE_BACKWARD,
    WHOLE_FORWARD,
    OperationId,
    compute_id,
)
from embrace_fx.vocabulary.ops import id_of, launch_of, op_name
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph
from embrace_fx.vocabulary.sizes import ExpectedSizes
from embrace_fx.vocabulary.submissions import awaited, begun_or_awaited, compute_up_to, is_submission


@dataclass(frozen=True)
class Sizes:
    """The bytes that collectives send, where the graph does not determine them.

    Attributes:
        sent: launch -> bytes that one rank sends, if known.
        row_bytes: table -> bytes that one rank sends for all rows of a batch, in one direction.
        ids_bytes: bytes that one rank sends in the AllGather of ids.
        norm_bytes: table -> bytes that one rank sends to sum squares of its rows over ranks, for row-wise optimizers.
        buckets_as: the dtype in which buckets are sent.
    """

    sent: Mapping[OperationId, int]
    row_bytes: Mapping[str, int]
    ids_bytes: int
    norm_bytes: Mapping[str, int] = field(default_factory=dict)
    buckets_as: Format = "exact"


@dataclass
class Block:
    """A compute operation: consecutive nodes between two communication points of a window (a backward and the next
    forward).

    Attributes:
        id: the id of the operation.
        ms: estimated milliseconds of its nodes.
        awaits: for each launch or copy that it waits for, (its id, how many windows earlier it was submitted).
        submits: nodes at its end that submit a collective.
        begins: nodes at its end that begin a copy, or an exchange of an output layer.
    """

    id: OperationId
    ms: float = 0.0
    awaits: list[tuple[OperationId, int]] = field(default_factory=list)
    submits: list[fx.Node] = field(default_factory=list)
    begins: list[fx.Node] = field(default_factory=list)


def compute_blocks(graph: TrainingGraph, node_ms: NodeMs) -> list[Block]:
    """Returns the compute operations of a window (a backward and the next forward), in program order.

    Args:
        node_ms: function that returns the milliseconds of a node.
    """
    early, end, between = Block(EARLY), Block(END), Block(BETWEEN)
    found = [early, *_backward_blocks(graph.phases["backward"], early, end, node_ms), end, between]
    ids = [node for node in graph.phases["ids"].graph.nodes if launch_of(node) == IDS]
    of_forward = list(_forward_blocks(graph.phases["forward"], between, node_ms))
    # If no launch exchanges ids, the calling thread exchanges them before the forward: add them to the operation
    # `between`.
    if ids and IDS not in map(launch_of, between.submits):
        between.submits += ids
        for block in of_forward:
            if any(_is_lookup(node) for node in block.submits):
                block.awaits.append((IDS, 0))
    return found + of_forward


def _is_lookup(node: fx.Node) -> bool:
    """Returns whether a node submits or awaits the AlltoAll of looked-up rows."""
    launch = launch_of(node)
    return launch is not None and launch.kind == "lookups"


def _backward_blocks(backward: fx.GraphModule, early: Block, end: Block, node_ms: NodeMs) -> Iterator[Block]:
    """Yields the compute operations of the backward, in program order, except `early` and `end`.

    Args:
        early: the operation at the start of the backward, which submits early rows; filled in place.
        end: the operation after the last submission of gradients; filled in place.
        node_ms: function that returns the milliseconds of a node.
    """
    block = early
    for node in backward.graph.nodes:
        launch = awaited(node)
        if begun_or_awaited(node) is not None:
            yield _end_block(node, end)
        elif launch is not None and launch.needs_lookahead:
            early.awaits.append((launch, 1))
        elif launch is not None:
            end.awaits.append((launch, 0))
        elif is_submission(node) and _is_lookup(node):
            early.submits.append(node)
        elif is_submission(node):
            what = compute_id("backward", id_of(node).what)
            if block.id != what:
                block = Block(what, end.ms, _pop_ending_awaits(end))
                end.ms = 0.0
                yield block
            block.submits.append(node)
        else:
            end.ms += node_ms(node)


def _forward_blocks(forward: fx.GraphModule, between: Block, node_ms: NodeMs) -> Iterator[Block]:
    """Yields the compute operations of the forward, in program order.

    Args:
        between: the operation between backward and forward, to which the submission of ids is added.
        node_ms: function that returns the milliseconds of a node.
    """
    segment: Block | None = Block(START)
    waiting = Block(START)  # compute between the last submission and the next wait
    for node in forward.graph.nodes:
        if begun_or_awaited(node) is not None:
            yield _end_block(node, segment or waiting)
            continue
        launch, of_rows = awaited(node), op_name(node) == "_c10d_functional::wait_tensor"
        if is_submission(node) and launch_of(node) == IDS:
            between.submits.append(node)
        elif is_submission(node):
            spent = segment.ms if segment is not None else 0.0
            awaits = (segment.awaits if segment is not None else []) + waiting.awaits
            yield Block(compute_id("update", id_of(node).what), spent + waiting.ms, awaits, [node])
            waiting = Block(START)
            segment = Block(segment.id) if segment is not None else None
        elif launch is not None:
            if segment is not None and op_name(node) != "embrace::update_rows":
                yield segment
                segment = None
            waiting.awaits.append((launch, 0))
        else:
            (segment or waiting).ms += node_ms(node)
        ends = _operation_ending_at(node) if not of_rows or launch is None else compute_id("rows", launch.what)
        if ends is not None:
            waiting.id = ends
            yield waiting
            segment, waiting = Block(compute_id("forward", ends.what)), Block(START)
    yield segment or waiting


def _cut_at_copies(
    module: fx.GraphModule, what: OperationId, node_ms: NodeMs, before_ms: float = 0.0
) -> Iterator[Block]:
    """Cuts a phase without collectives into compute operations, at the nodes that begin a copy or wait for one. Yields
    them in order; the last one has the id `what`.

    Args:
        before_ms: milliseconds of compute before the phase, added to the first operation.
    """
    block = Block(what, before_ms)
    for node in module.graph.nodes:
        if begun_or_awaited(node) is not None:
            yield _end_block(node, block)
        else:
            block.ms += node_ms(node)
    yield block


def build_single_process(graph: TrainingGraph, compute: cost.Compute) -> StepGraph:
    """Returns the step graph of a window (a backward and the next forward) in a single process. It has compute and
    copies, but no collectives.
    """
    node_ms, phases = node_time_estimator(compute, graph.expected), graph.phases
    head_ms = sum(node_ms(node) for name in ("unique", "ids") for node in phases[name].graph.nodes)
    found = [
        *_cut_at_copies(phases["backward"], WHOLE_BACKWARD, node_ms),
        Block(BETWEEN),
        *_cut_at_copies(phases["forward"], WHOLE_FORWARD, node_ms, head_ms),
    ]
    operations: list[Operation] = []
    dependences: list[Dependence] = []
    for block in found:
        operations.append(Operation.from_id(block.id, block.ms))
        _add_copies(block, operations, dependences)
    return StepGraph(tuple(operations), tuple(dependences), tuple(str(block.id) for block in found))


def _add_copies(block: Block, operations: list[Operation], dependences: list[Dependence]) -> None:
    """Adds the copies that a block begins to `operations`, and all dependences of the block and its copies to
    `dependences`.
    """
    name = str(block.id)
    dependences += [Dependence(str(launch), name, distance) for launch, distance in block.awaits]
    for node in block.begins:
        launch = id_of(node)
        if launch.lane not in COPIES:
            continue
        operations.append(Operation.from_id(launch, node.meta["copy_ms"], nbytes(node.meta["val"]), (launch.what,)))
        dependences.append(Dependence(name, str(launch)))
        if op_name(node) == RELOAD:
            dependences.append(Dependence(str(offload_id(launch.what)), str(launch), 1))


def _end_block(node: fx.Node, block: Block) -> Block:
    """Ends a compute operation at a node that begins or awaits a copy or an output layer's exchange. Returns the ended
    operation; `block` continues with the nodes after it.
    """
    ended = Block(compute_up_to(node), block.ms, _pop_ending_awaits(block))
    block.ms = 0.0
    found = begun_or_awaited(node)
    assert found is not None
    launch, awaits = found
    if awaits:
        block.awaits.append((launch, 0))
    else:
        ended.begins.append(node)
    return ended


def _pop_ending_awaits(block: Block) -> list[tuple[OperationId, int]]:
    """Removes from a block its waits for copies and for gathered hidden states of output layers, and returns them. Each
    of these waits ends a compute operation.
    """
    found = [each for each in block.awaits if _ends_block(each[0])]
    block.awaits = [each for each in block.awaits if not _ends_block(each[0])]
    return found


def _ends_block(launch: OperationId) -> bool:
    """Returns whether a wait for this launch ends a compute operation. This holds for copies and for the gathered
    hidden states of output layers.
    """
    return launch.lane in COPIES or launch.kind == "positions"


def _operation_ending_at(node: fx.Node) -> OperationId | None:
    """Returns the id of the compute operation that ends at a node that reads awaited rows or an awaited bucket, or None
    for other nodes.
    """
    match op_name(node):
        case "embrace::join_rows":
            return compute_id("rows", _awaited_launch(node).what)
        case "embrace::update_bucket":
            return compute_id("update", _awaited_launch(node).what)
    return None


def _awaited_launch(node: fx.Node) -> OperationId:
    """Returns the launch id of the first wait among a node's inputs."""
    return next(launch for value in node.all_input_nodes if (launch := launch_of(value)) is not None)


def build_step_graph(
    graph: TrainingGraph,
    sizes: Sizes,
    durations: Mapping[OperationId, float] | None,
    cluster: cost.Cluster,
    world_size: int,
) -> StepGraph:
    """Returns the step graph of a window (a backward and the next forward), with durations measured or estimated.

    Args:
        graph: a partitioned graph.
        sizes: the bytes that collectives send.
        durations: maps compute operations to measured milliseconds. Missing operations take 0 ms. None to estimate all
            durations.
        cluster: the links and the speed of compute, for estimates.
    """
    operations: list[Operation] = []
    dependences: list[Dependence] = []
    order: list[str] = []
    found = compute_blocks(graph, node_time_estimator(cluster.compute, graph.expected))
    durations = {block.id: block.ms for block in found} if durations is None else durations
    between = next(k for k, block in enumerate(found) if block.id == BETWEEN)
    found[between:between] = [Block(each) for each in BESIDE if each in durations]
    pieces = _count_pieces(found)
    # The last exchange of an output layer. The calling thread starts such exchanges in program order.
    of_head: OperationId | None = None
    for block in found:
        alone = block.id in (EARLY, END, BETWEEN, START, *BESIDE)
        name, served = str(block.id), () if alone else (block.id.what,)
        operations.append(Operation.from_id(block.id, durations.get(block.id, 0.0), serves=served))
        order.append(name)
        _add_copies(block, operations, dependences)
        for node in [*block.submits, *(node for node in block.begins if id_of(node).kind == "positions")]:
            launch = id_of(node)
            if launch.kind == "positions":
                dependences += [Dependence(str(of_head), str(launch))] if of_head is not None else []
                of_head = launch
            sent = sizes.sent.get(launch, _sent_bytes(node, launch, sizes, pieces, world_size, graph.expected))
            reduces = launch.kind == "all_reduce"
            collective: Any = "all_reduce" if reduces else "all_gather" if launch == IDS else "all_to_all"
            duration = cluster.transfer_ms(sent, (world_size - 1) * (2 if reduces else 1), collective)
            serves = (launch.what,) if launch != IDS else tuple(sizes.row_bytes)
            operations.append(Operation.from_id(launch, duration, sent, serves, held_bytes=sent))
            dependences.append(Dependence(name, str(launch)))
    return _add_norm_exchange(
        StepGraph(tuple(operations), tuple(dependences), tuple(order)), sizes, cluster, world_size
    )


def _add_norm_exchange(steps: StepGraph, sizes: Sizes, cluster: cost.Cluster, world_size: int) -> StepGraph:
    """Returns a copy of the step graph that includes the exchange that sums squares of rows over ranks, if an optimizer
    needs it.

    Args:
        sizes: the bytes that collectives send.
        cluster: the speed of the links.
        world_size: the number of ranks.
    """
    tables = {table for table, nbytes in sizes.norm_bytes.items() if nbytes}
    if not tables:
        return steps
    sent, norms = sizes.sent.get(ROW_NORMS, sum(sizes.norm_bytes.values())), str(ROW_NORMS)
    duration = cluster.transfer_ms(sent, 2 * (world_size - 1), "all_reduce")
    gradients = [o.name for o in steps.operations if o.kind in ("gradients", "delayed") and tables & {*o.serves}]
    awaited = dict.fromkeys(d.after for d in steps.dependences if d.before in gradients and not d.distance)
    # Leave out gradients that the last operation of the backward awaits, because no update awaits them.
    updates = [name for name in awaited if name != str(END)]
    optimizer = next(name for name in steps.compute_order if name in (str(OPTIMIZER), str(BETWEEN)))
    return replace(
        steps,
        operations=(*steps.operations, Operation.from_id(ROW_NORMS, duration, sent, tuple(sorted(tables)))),
        dependences=(
            *steps.dependences,
            *(Dependence(each, norms) for each in (str(END), *gradients)),
            *(Dependence(each, optimizer) for each in gradients),
            *(Dependence(norms, each) for each in updates or (optimizer,)),
        ),
    )


def _count_pieces(blocks_of_window: Sequence[Block]) -> dict[str, int]:
    """Maps each table to the number of pieces in which its delayed gradients are sent, for the blocks of a window."""
    launches = [id_of(node) for block in blocks_of_window for node in block.submits]
    return {launch.what: launch.number + 1 for launch in launches if launch.part == "delayed"}


def _sent_bytes(
    node: fx.Node,
    launch: OperationId,
    sizes: Sizes,
    pieces: Mapping[str, int],
    world_size: int,
    expected: ExpectedSizes,
) -> int:
    """Returns the bytes that one rank sends in the collective that a node submits.

    Until the sizes are measured, half of a batch's rows are assumed to be early rows (which the last step has not
    changed), and half of the gradients of rows to be delayed (because the next batch does not read these rows).

    Args:
        launch: the id of the collective.
        sizes: the bytes that collectives send, where known.
        pieces: table -> the number of pieces of its delayed gradients.
        expected: the values of data-dependent sizes.
    """
    if launch == IDS:
        return sizes.ids_bytes
    if launch.kind == "positions":  # each pair of ranks sends equally much in both directions
        exchanged: Tensor = node.meta["val"]
        of_all_ranks = prod(map(expected.number, exchanged.shape)) * exchanged.element_size()
        return of_all_ranks // world_size * (world_size - 1)
    if launch.kind == "all_reduce":
        value = node.meta["val"]
        elements = node.args[2] if op_name(node) == "embrace::submit_chunk" else value.numel()
        assert isinstance(elements, int)
        return cost.all_reduce(
            Wire(value.element_size(), sizes.buckets_as).dense_bytes(elements), world_size
        ).sent_bytes
    rows = sizes.row_bytes.get(launch.what, 0)
    match launch.part:
        case "early":
            return rows // 2
        case "delayed":
            return rows // 2 // pieces[launch.what]
    return rows
