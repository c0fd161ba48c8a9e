"""Checks that a given plan fits the model; nothing is probed or decided anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from embrace_fx.passes.planner.pricing import shard_blocker
from embrace_fx.planning.findings import facts_of
from embrace_fx.planning.reads import used_parameters
from embrace_fx.setup.setting import Setting
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import AUTO


def repeated(setting: Setting, graph: TrainingGraph, plan: Plan) -> Plan:
    """Returns the plan, with the schedule asked for, if it fits model, optimizers and ranks. Collective.

    Raises:
        ValueError: it does not fit on some rank; on every rank, with the first disagreement.
    """
    own = next(_misfits(setting, graph, plan), None)
    for found in setting.communicator.reports(own).values():
        raise ValueError(
            f"expected a plan of this model, optimizer and number of ranks, in the first call, found {found}. Save a "
            "plan of this very run, or leave out plan=."
        )
    asked = setting.options.schedule
    return plan if asked in (AUTO, plan.schedule_name) else replace(plan, schedule_name=asked, chosen_because="")


def _misfits(setting: Setting, graph: TrainingGraph, plan: Plan) -> Iterator[str]:
    """Yields each disagreement between plan and model in a few words."""
    if plan.world_size != setting.communicator.world_size:
        yield f"a plan for {plan.world_size} ranks on {setting.communicator.world_size}"
    used = used_parameters(graph)
    facts = facts_of(setting.model, setting.stepping.holders, setting.options.row_updates, used, {})
    planned, tables = {d.parameter: d for d in plan}, {table.parameter: table for table in graph.tables}
    if missing := planned.keys() ^ {fact.name for fact in facts}:
        yield f"parameters of the plan or of the model alone: {', '.join(sorted(missing)[:3])}"
        return
    options = setting.options
    asked = options.rows
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
            yield f"{fact.name}, to which the batch gives a gradient, unused in the plan"
        if decision.strategy != "alltoall":
            continue
        blocker = shard_blocker(tables[fact.name]) if fact.name in tables else "no lookup reads it"
        if blocker or fact.row_update_blocker:
            yield f"{fact.name} in shards, which cannot be: {blocker or fact.row_update_blocker}"
