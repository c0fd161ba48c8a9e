"""Uses a given plan again, where it fits the model, its optimizers and the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from embrace_fx.passes.planner.plan_fit import used_parameters
from embrace_fx.passes.planner.pricing import shard_blocker, vocabulary_blocker
from embrace_fx.planning.findings import facts_of
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import SHARDED, Plan
from embrace_fx.vocabulary.schedule import AUTO


def repeated(context: Context, graph: TrainingGraph, plan: Plan) -> Plan:
    """Returns a given plan with the requested schedule. Raises if the plan does not fit some rank. Collective."""
    own = next(_disagreements(context, graph, plan), None)
    for found in context.communicator.reports(own).values():
        raise ValueError(
            f"plan=: the plan does not fit this model, optimizer or number of ranks: {found}. Save a plan of this run, "
            "or leave out plan=."
        )
    asked = context.options.schedule
    return plan if asked in (AUTO, plan.schedule_name) else replace(plan, schedule_name=asked, chosen_because="")


def _disagreements(context: Context, graph: TrainingGraph, plan: Plan) -> Iterator[str]:
    """Yields each disagreement between plan and model, in a few words."""
    if plan.world_size != context.communicator.world_size:
        yield f"a plan for {plan.world_size} ranks on {context.communicator.world_size}"
    used = used_parameters(graph)
    facts = facts_of(context.model, context.stepping.holders, context.options.row_updates, used, {})
    planned, tables = {d.parameter: d for d in plan}, {table.parameter: table for table in graph.tables}
    if missing := planned.keys() ^ {fact.name for fact in facts}:
        yield f"parameters of the plan or of the model alone: {', '.join(sorted(missing)[:3])}"
        return
    asked = context.options.rows
    for strategy in ("alltoall", "allreduce"):
        found = {d.travels_as for d in plan if d.strategy == strategy}
        if plan.world_size > 1 and found and (asked not in found or found - {asked, "exact"}):
            yield f"{strategy} in {', '.join(sorted(found))} in the plan, where {asked!r} is asked for"
    for fact in facts:
        decision = planned[fact.name]
        if tuple(decision.shape) != fact.shape:
            yield f"{fact.name} of shape {tuple(decision.shape)} in the plan and {fact.shape} in the model"
        if (decision.strategy == "frozen") == fact.trainable:
            yield f"{fact.name}, which is frozen in the plan or in the model alone"
        if fact.trainable and fact.used and decision.strategy == "unused":
            yield f"{fact.name} is unused in the plan, but gets a gradient from this batch"
        if decision.strategy not in SHARDED:
            continue
        if decision.strategy == "vocabulary":
            blocker = vocabulary_blocker(graph, fact.name)
        else:
            blocker = shard_blocker(tables[fact.name]) if fact.name in tables else "no lookup reads it"
        if blocker or fact.row_update_blocker:
            yield f"{fact.name} in shards, which cannot be: {blocker or fact.row_update_blocker}"
