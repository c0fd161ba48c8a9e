"""Decides in which order a window (a backward and the next forward) launches collectives.

The first order comes from the cost model; once every rank has measured a few steps, rank 0 computes the final one for
all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from embrace_fx.cost.storage import RowMemory, combine_memories
from embrace_fx.passes.memory.memory_timeline import memory_line
from embrace_fx.passes.node_cost import node_time_estimator
from embrace_fx.passes.overlap.order import BackwardUnits
from embrace_fx.passes.planner.step_cost import ids_exchange, one_way_bytes
from embrace_fx.passes.scheduler.compute_order import Atoms, search_order
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.scheduler.step_graph import Sizes, build_single_process, build_step_graph
from embrace_fx.passes.scheduler.storage_lane import add_storage_operations, set_read_ahead, with_measured_speed
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

_Found = tuple[Schedule, tuple[str, ...]]
"""The schedule that rank 0 has found, and units of the backward in their new order; without units it is unchanged."""


def predict_storage_reads(plan: Plan, ahead: int) -> dict[str, RowMemory]:
    """Predicts how many rows of tables larger than memory each step reads from storage.

    Args:
        ahead: the number of steps by which rows are read before the step that needs them.

    Returns:
        Maps the name of a table, or of a joined table, to its prediction.
    """
    return {
        name: set_read_ahead(combine_memories(beyond), ahead, plan.world_size)
        for name, tables in plan.row_exchanges.items()
        if (beyond := [plan.memory[table] for table in tables if table in plan.memory])
    }


def decide_order(
    context: Context,
    plan: Plan,
    graph: TrainingGraph,
    memory: Mapping[str, RowMemory],
    profiled: Profile | None = None,
    *,
    compute_in_order: Callable[[tuple[str, ...]], TrainingGraph] | None = None,
) -> tuple[Schedule, Mapping[str, RowMemory]]:
    """Decides the order of launches on rank 0, for all ranks. Collective.

    Args:
        graph: the graph of the first training batch, as it runs.
        memory: name of a table or joined table larger than memory -> its predicted reads from storage.
        profiled: the measured times, or None to use the cost model. Measured speeds replace those in `memory`.
        compute_in_order: a function that puts units of the backward in another order and returns the new graph. It is
            called if measured times predict a gain.

    Returns:
        (the schedule, the predicted reads from storage), equal on every rank.

    Raises:
        VerificationError: the order breaks an invariant.
    """
    communicator = context.communicator
    if profiled is not None:
        memory = {key: with_measured_speed(key, of, profiled.byte_ms) for key, of in memory.items()}
    own: _Found | None = None
    if communicator.rank == 0:
        name, steps = plan.schedule_name, _step_graph(context, plan, graph, memory, profiled)
        copies = any(op_name(node) in COPY_OPS for node in graph.phases["backward"].graph.nodes)
        # A new order of compute would need another compilation of regions and another placement of copies.
        if profiled is None or context.options.backend != "eager" or copies:
            own = schedule(steps, name, "profile" if profiled else "cost model"), ()
        else:
            own = _search_order(context, plan, graph, steps, name, profiled)
    found = communicator.gather(own, _Found | None)[0]
    assert found is not None  # rank 0 always sends a schedule
    agreed, units = found
    if units and compute_in_order is not None:
        graph = compute_in_order(units)
    if plan.world_size > 1:
        check_launches(graph, issued_launches(agreed, plan))
    check_storage(agreed.steps, memory)
    node_ms = node_time_estimator(plan.links.compute, graph.expected)
    line = memory_line(agreed.predicted, step_memory(graph), node_ms)
    return replace(agreed, predicted=replace(agreed.predicted, memory=line)), memory


def _search_order(
    context: Context, plan: Plan, graph: TrainingGraph, steps: StepGraph, name: str, profiled: Profile
) -> _Found:
    """Searches for the fastest schedule by measured times, together with an order of the backward's units. A unit is
    the compute needed before one table's or bucket's gradients can be sent.

    Args:
        steps: the operations of a window (a backward and the next forward), in the present order.
        name: the name of the schedule, such as "2d".
        profiled: the measured times.

    Returns:
        (the schedule; the names of the units in their new order, or () if the present order is the best).
    """
    measured = {each.what: ms for each, ms in profiled.compute_ms.items() if each.kind == "backward"}
    units = BackwardUnits.find(graph.phases["backward"])
    atoms = Atoms.build(units, node_time_estimator(plan.links.compute, graph.expected), measured)
    memory = step_memory(graph)
    may_hold = MAY_HOLD if context.options.memory_budget is None else 1.0
    bound = round(memory.backward_peak([*units.needed_by]) * may_hold)
    return search_order(steps, name, atoms, lambda units_: memory.backward_peak(units.order_nodes(units_)), bound)


def _step_graph(
    context: Context, plan: Plan, graph: TrainingGraph, memory: Mapping[str, RowMemory], profiled: Profile | None
) -> StepGraph:
    """Returns the operations of a window (a backward and the next forward), with their durations and dependences.

    Args:
        memory: the predicted reads from storage of tables larger than memory, by table or joined table.
        profiled: the measured times and sizes, or None to use the cost model.
    """
    cluster = plan.links.flattened(plan.world_size)
    if plan.world_size == 1:
        return add_storage_operations(build_single_process(graph, cluster.compute), memory)
    sparse = {k: bucket[0] for k, bucket in enumerate(plan.buckets) if bucket[0] in plan.exchanged}
    expected = {chunk_id(k, 0): plan[name].sent_bytes_per_step for k, name in sparse.items()}
    sizes = Sizes(
        profiled.sent_bytes if profiled else expected,  # without a profile, the bytes follow from the bucket's size
        {name: one_way_bytes(plan, tables) for name, tables in plan.row_exchanges.items()},
        sum(ids_exchange(plan[table], plan.world_size).sent_bytes for table in plan.sharded),
        {name: sum(plan[table].norm_bytes for table in tables) for name, tables in plan.row_exchanges.items()},
        context.options.rows,
    )
    steps = build_step_graph(graph, sizes, profiled.compute_ms if profiled else None, cluster, plan.world_size)
    return add_storage_operations(steps, memory)


def issued_launches(schedule: Schedule, plan: Plan) -> tuple[OperationId, ...]:
    """Returns the launches of a schedule that the launcher issues, in order.

    The calling thread itself issues the AllReduce of row norms, the exchanges of output layers, and the AllGather of
    ids of a batch that was not known ahead.
    """
    of_launcher = [each for each in schedule.launches if each != ROW_NORMS and each.kind != "positions"]
    return tuple(each for each in of_launcher if plan.looks_ahead or each != IDS)
