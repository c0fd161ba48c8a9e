"""Computes the facts shown beside the picture of a schedule: where tables are, DDP's step, steps on other numbers of
ranks.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from embrace_fx.cost.links import Collective, all_reduce, exchange
from embrace_fx.passes.scheduler.launch_order import quick_step_ms
from embrace_fx.vocabulary.ops import own_columns
from embrace_fx.vocabulary.picture_facts import PictureFacts, StepEstimate, TablePlace
from embrace_fx.vocabulary.plan import Decision, Plan
from embrace_fx.vocabulary.schedule import Operation, Schedule, StepGraph

RANKS = (2, 8, 64)
ELEMENT_BYTES = 4
"""Bytes of an element, where only shares of bytes are shown."""

_COLLECTIVE: dict[str, Collective] = {
    "all_reduce": "all_reduce",
    "ids": "all_gather",
    "gradients": "all_to_all",
    "lookups": "all_to_all",
    "delayed": "all_to_all",
}


def compute_facts(plan: Plan, schedule: Schedule) -> PictureFacts:
    """Returns the facts shown beside the picture of a plan's schedule, such as the predicted step time on other numbers
    of ranks.
    """
    if plan.world_size == 1:
        return PictureFacts(0.0, (), table_places(plan))
    steps = []
    for ranks in sorted({*RANKS, plan.world_size}):
        is_own = ranks == plan.world_size
        step_ms = (
            schedule.diagnostics().step_ms if is_own else quick_step_ms(rescale_to_ranks(schedule.steps, plan, ranks))
        )
        steps.append(StepEstimate(ranks, step_ms, ddp_exposed_ms(plan, schedule.steps, ranks)))
    return PictureFacts(ddp_exposed_ms(plan, schedule.steps, plan.world_size), tuple(steps), table_places(plan))


def ddp_exposed_ms(plan: Plan, steps: StepGraph, ranks: int) -> float:
    """Estimates the milliseconds per step that DDP on `ranks` ranks would wait for communication. Gradients of tables
    are assumed to be ready only when the backward ends.
    """
    tables, others = 0, 0
    for decision in plan:
        reduced = round(decision.ddp_bytes_per_step * plan.world_size / (2 * (plan.world_size - 1)))
        if decision.is_table:
            tables += reduced
        else:
            others += reduced
    links = plan.links.flattened(ranks)
    backward_ms = sum(each.duration_ms for each in steps.operations if each.kind == "backward")
    tables_ms, others_ms = (
        all_reduce(each, ranks).time_ms(links, "all_reduce") if each else 0 for each in (tables, others)
    )
    return tables_ms + max(0.0, others_ms - backward_ms)


def rescale_to_ranks(steps: StepGraph, plan: Plan, ranks: int) -> StepGraph:
    """Returns a copy of the step graph in which the durations of collectives are predicted for another number
    of ranks.
    """
    return replace(steps, operations=tuple(_rescale_operation(each, plan, ranks) for each in steps.operations))


def _rescale_operation(operation: Operation, plan: Plan, ranks: int) -> Operation:
    """Returns an operation with its duration scaled from the plan's number of ranks to `ranks`."""
    collective = _COLLECTIVE.get(operation.kind)
    if collective is None or not operation.is_communication or not operation.sent_bytes:
        return operation
    own_bytes = operation.sent_bytes * 1000 // exchange(collective, 1000, plan.world_size).sent_bytes
    now, then = (
        exchange(collective, own_bytes, each).time_ms(plan.links.flattened(each), collective)
        for each in (plan.world_size, ranks)
    )
    return replace(operation, duration_ms=operation.duration_ms * then / now)


def table_places(plan: Plan) -> tuple[TablePlace, ...]:
    """Returns the rows and columns of each table that each rank stores. The largest table comes first."""
    all_elements = sum(prod(decision.shape) for decision in plan)
    found = [
        TablePlace(
            decision.parameter,
            decision.shape,
            decision.name,
            _describe_parts(decision, plan),
            prod(decision.shape) * ELEMENT_BYTES,
            prod(decision.shape) / all_elements if all_elements else 0.0,
            decision.sent_bytes_per_step / plan.sent_bytes_per_step if plan.sent_bytes_per_step else 0.0,
        )
        for decision in plan
        if decision.is_table
    ]
    return tuple(sorted(found, key=lambda place: -place.table_bytes))


def _describe_parts(decision: Decision, plan: Plan) -> tuple[str, ...]:
    """Describes in words the part of a table that each rank has, one text per rank, or a single text if all ranks have
    the same.
    """
    if decision.parameter not in plan.divided:
        return ("all of it",)
    width, world_size = decision.shape[1], plan.world_size
    parts = []
    for rank in range(world_size):
        grid = decision.grid
        row, column = (0, rank) if grid is None else grid.place(rank)
        first, end = own_columns(width, world_size if grid is None else grid.columns, column)
        columns = "no columns" if first == end else f"columns {first} to {end - 1}"
        parts.append(columns if grid is None or grid.rows == 1 else f"{columns}, rows {row}, {row + grid.rows}, ..")
    return tuple(parts)
