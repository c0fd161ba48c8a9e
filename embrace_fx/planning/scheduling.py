"""Decides the launch order of a window from a plan; binds no runtime.

The first order comes from the cost model; once every rank has measured a few steps, rank 0 computes the final one for
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from embrace_fx.cost.storage import RowMemory, together
from embrace_fx.passes.memory.memory_timeline import memory_line
from embrace_fx.passes.node_cost import estimate
from embrace_fx.passes.overlap.order import BackwardUnits
from embrace_fx.passes.planner.step_cost import ids_exchange, one_way_bytes
from embrace_fx.passes.scheduler.compute_order import Atoms, search
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.scheduler.step_graph import Sizes, build, build_alone
from embrace_fx.passes.scheduler.storage_lane import at_pace, read_ahead, with_storage
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.passes.verifier.storage_order import check_storage
from embrace_fx.passes.verifier.windows import check_launches
from embrace_fx.runtime.launch.profile import Profile
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.copy_ops import COPY_OPS
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import IDS, ROW_NORMS, OperationId, chunk_id
from embrace_fx.vocabulary.ops import op_name
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import Schedule, StepGraph

MAY_HOLD = 1.05
"""Peak memory of a backward in another order, at most, over its peak in autograd's order; 1 under a budget."""

ComputeInOrder = Callable[[tuple[str, ...]], TrainingGraph]
"""Reorders the backward's units, and returns the new graph."""

_Found = tuple[Schedule, tuple[str, ...]]
"""The schedule that rank 0 has found, and units of the backward in their new order; without units it is unchanged."""


class Order(NamedTuple):
    """The order that all ranks' steps follow.

    Attributes:
        memory: prediction for tables beyond memory, by row exchange; at the measured speed once there is a profile.
    """

    schedule: Schedule
    memory: Mapping[str, RowMemory]


def rows_beyond_memory(plan: Plan, ahead: int) -> dict[str, RowMemory]:
    """Predicts the reads of rows beyond memory by row exchange, for a loader that is read this many batches ahead."""
    return {
        name: read_ahead(together(beyond), ahead, plan.world_size)
        for name, tables in plan.row_exchanges.items()
        if (beyond := [plan.memory[table] for table in tables if table in plan.memory])
    }


def order(
    context: Context,
    plan: Plan,
    graph: TrainingGraph,
    memory: Mapping[str, RowMemory],
    profiled: Profile | None = None,
    *,
    name: str = "",
    compute_in_order: ComputeInOrder | None = None,
) -> Order:
    """Returns, on every rank, the order that rank 0 computes. Collective.

    Args:
        graph: the graph of the first training batch, as it runs.
        name: the schedule to follow; "": the plan's.
        compute_in_order: reorders the backward where that is faster by the profile; None: its order is fixed.

    Raises:
        VerificationError: the order breaks an invariant.
    """
    communicator = context.communicator
    if profiled is not None:
        memory = {key: at_pace(key, of, profiled.byte_ms) for key, of in memory.items()}
    own: _Found | None = None
    if communicator.rank == 0:
        name, steps = name or plan.schedule_name, _step_graph(context, plan, graph, memory, profiled)
        # In another order, regions would have to be compiled, and copies placed, again.
        if profiled is None or compute_in_order is None or context.options.backend != "eager" or _copies(graph):
            own = schedule(steps, name, "profile" if profiled else "cost model"), ()
        else:
            own = _search(context, plan, graph, steps, name, profiled)
    found = communicator.gather(own, _Found | None)[0]
    assert found is not None  # rank 0 has found one
    agreed, units = found
    if units and compute_in_order is not None:
        graph = compute_in_order(units)
    if plan.world_size > 1:
        check_launches(graph, launches(agreed, plan))
    check_storage(agreed.steps, memory)
    node_ms = estimate(plan.links.among(plan.world_size).compute, graph.expected)
    line = memory_line(agreed.predicted, step_memory(graph), node_ms)
    return Order(replace(agreed, predicted=replace(agreed.predicted, memory=line)), memory)


def _copies(graph: TrainingGraph) -> bool:
    return any(op_name(node) in COPY_OPS for node in graph.phases["backward"].graph.nodes)


def _search(
    context: Context, plan: Plan, graph: TrainingGraph, steps: StepGraph, name: str, profiled: Profile
) -> _Found:
    """Searches the order of launches and of the backward's units that takes the least by a profile."""
    measured = {each.what: ms for each, ms in profiled.compute_ms.items() if each.kind == "backward"}
    units = BackwardUnits.of(graph.phases["backward"])
    atoms = Atoms.of(units, estimate(plan.links.among(plan.world_size).compute, graph.expected), measured)
    memory = step_memory(graph)
    may_hold = MAY_HOLD if context.options.memory_budget is None else 1.0
    bound = round(memory.backward_peak([*units.needed_by]) * may_hold)
    return search(steps, name, "profile", atoms, lambda units_: memory.backward_peak(units.ordered(units_)), bound)


def _step_graph(
    context: Context, plan: Plan, graph: TrainingGraph, memory: Mapping[str, RowMemory], profiled: Profile | None
) -> StepGraph:
    """Builds the step graph of a window."""
    cluster = plan.links.among(plan.world_size)
    if plan.world_size == 1:
        return with_storage(build_alone(graph, cluster.compute), memory)
    sparse = {k: bucket[0] for k, bucket in enumerate(plan.buckets) if bucket[0] in plan.exchanged}
    expected = {chunk_id(k, 0): plan[name].sent_bytes_per_step for k, name in sparse.items()}
    sizes = Sizes(
        profiled.sent_bytes if profiled else expected,  # else bytes follow from a bucket's size
        {name: one_way_bytes(plan, tables) for name, tables in plan.row_exchanges.items()},
        sum(ids_exchange(plan[table], plan.world_size).sent_bytes for table in plan.sharded),
        {name: sum(plan[table].norm_bytes for table in tables) for name, tables in plan.row_exchanges.items()},
        context.options.rows,
    )
    steps = build(graph, sizes, profiled.compute_ms if profiled else None, cluster, plan.world_size)
    return with_storage(steps, memory)


def launches(schedule: Schedule, plan: Plan) -> tuple[OperationId, ...]:
    """Lists the launches of a schedule that the launcher issues.

    The calling thread issues the AllReduce of row norms, the exchanges of output layers, and the AllGather of ids of a
    batch that was not known ahead.
    """
    ahead = looks_ahead(plan)
    of_launcher = [each for each in schedule.launches if each != ROW_NORMS and each.kind != "positions"]
    return tuple(each for each in of_launcher if ahead or each != IDS)


def looks_ahead(plan: Plan) -> bool:
    """Whether rows of the next batch travel during a step."""
    return plan.world_size > 1 and plan.schedule_name in LOOKS_AHEAD and bool(plan.overlapped)


def cuts(context: Context, plan: Plan) -> Cuts:
    """Cuts a plan's communication into pieces; one process has none."""
    if plan.world_size == 1:
        return Cuts((), ())
    chunks = tuple(tuple(bucket_chunks(context, plan, bucket)) for bucket in plan.buckets)
    exchanged = plan.overlapped.items() if plan.schedule_name in LOOKS_AHEAD else ()
    return Cuts(chunks, tuple((name, delayed_chunks(plan, tables)) for name, tables in exchanged))


def bucket_chunks(context: Context, plan: Plan, bucket: tuple[str, ...]) -> list[int]:
    """Counts the elements of each chunk of a bucket's AllReduce: equal chunks of about the cost model's size.

    Schedule "none" reduces whole buckets, because no launch overtakes another. A sparse exchange, which sends in
    rounds, takes a whole gradient.
    """
    parameters = [context.state.parameter(name) for name in bucket]
    elements = sum(parameter.numel() for parameter in parameters)
    if plan.schedule_name == "none" or bucket[0] in plan.exchanged:
        return [elements]
    wanted = cost.chunk_bytes(plan.links, plan.world_size) / parameters[0].element_size()
    count = max(1, round(elements / wanted))
    size = ceil(elements / count)
    return [min(size, elements - start) for start in range(0, elements, size)]


def delayed_chunks(plan: Plan, tables: Sequence[str]) -> int:
    """Counts the pieces of tables' delayed gradients, as if all of the first batch's rows were delayed."""
    own = _one_way_bytes(plan, tables) * plan.world_size / (plan.world_size - 1)
    return max(1, round(own / cost.chunk_bytes(plan.links, plan.world_size, "all_to_all")))


def _one_way_bytes(plan: Plan, tables: Sequence[str]) -> int:
    """Counts the bytes of tables' rows one way; as many are those of their gradients, the other way."""
    return sum(rows_bytes(plan[table], plan.world_size) for table in tables) // 2


@dataclass(frozen=True)
class Profile:
    """Medians over a few steps on one rank.

    Attributes:
        compute_ms: compute operation -> milliseconds.
        sent_bytes: launch -> bytes.
        byte_ms: read or write of rows beyond memory -> milliseconds per byte.
    """

    compute_ms: dict[OperationId, float]
    sent_bytes: dict[OperationId, int]
    byte_ms: dict[OperationId, float] = field(default_factory=dict)


def profile(recording: Recording) -> Profile:
    """Computes the medians over the whole windows of a recording."""
    windows = range(recording.window)
    spans: dict[OperationId, list[float]] = {}
    for span in compute_spans(recording):
        if span.window in windows:  # sum of the pieces of an operation that waits have split
            spans.setdefault(span.operation, [0.0] * len(windows))[span.window] += (span.ended_s - span.started_s) * 1e3
    sent: dict[OperationId, list[int]] = {}
    took_ms: dict[OperationId, float] = {}
    for transfer in recording.transfers:
        sent.setdefault(transfer.launch, []).append(transfer.sent_bytes)
        if transfer.launch.lane == "storage":
            took = (transfer.ended_s - transfer.started_s) * 1e3
            took_ms[transfer.launch] = took_ms.get(transfer.launch, 0.0) + took
    return Profile(
        {operation: median(values) for operation, values in spans.items()},
        {launch: round(median(values)) for launch, values in sent.items()},
        {launch: ms / sum(sent[launch]) for launch, ms in took_ms.items()},
    )


def agree_on_profile(everyone: Sequence[Profile]) -> Profile:
    """Makes one profile for all ranks: the slowest rank's compute, the mean of sent bytes, the slowest storage."""
    slowest = max(everyone, key=lambda each: sum(each.compute_ms.values()))
    launched = {launch for each in everyone for launch in each.sent_bytes}
    sent = {launch: round(mean(each.sent_bytes.get(launch, 0) for each in everyone)) for launch in launched}
    moved = {launch for each in everyone for launch in each.byte_ms}
    paces = {launch: max(each.byte_ms.get(launch, 0.0) for each in everyone) for launch in moved}
    return Profile(slowest.compute_ms, sent, paces)
