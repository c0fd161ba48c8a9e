"""Fits plans to batches and models: the needs of later batches, renamed parameters, a plan that is given.

A plan is made for the first batch. The needs of later ones are added to it on all ranks, without probing or pricing:
DDP with `find_unused_parameters` trains such models, and so does embrace_fx.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from embrace_fx.cost.wire import Format
from embrace_fx.passes.planner.pricing import shard_blocker, vocabulary_blocker
from embrace_fx.planning.findings import WHOLE, facts_of, unshardable, used_parameters
from embrace_fx.setup.context import Context
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import SHARDED, Decision, Plan
from embrace_fx.vocabulary.row_space import RowSpace
from embrace_fx.vocabulary.schedule import AUTO

LATE = "first used after the plan was made"
RENAMED = "{} have other names on some ranks: prune or parametrize modules on every rank"
NO_MOMENT = (
    "{} are used in another way than before, which needs another plan, and {}. Run every call's backward first, and "
    "under no_sync() the step; then call the model once with such a batch"
)


@dataclass(frozen=True)
class PlanViolation:
    """The needs of a batch that a plan does not meet.

    Attributes:
        late: parameters that get a gradient although the plan counts them as unused or frozen.
        whole: tables that the plan shards but that its forward reads in a way shards cannot be read.
        eager: why no graph holds its forward, in one line; "": a graph does.
        sparse: of `late`, tables whose gradients are sparse.
        renamed: (old, new) names of parameters whose modules hold them by other names now.
    """

    late: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    eager: str = ""
    sparse: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def names(self) -> tuple[str, ...]:
        """Returns the names of all parameters that it is about."""
        return (*self.late, *self.whole, *(old for old, _ in self.renamed))

    def __bool__(self) -> bool:
        return bool(self.late or self.whole or self.eager or self.renamed)


def violation(
    plan: Plan, graph: TrainingGraph, hooked: Collection[str] = (), ignored: Collection[str] = ()
) -> PlanViolation:
    """Compares a plan with a captured graph (tables found) of a training or evaluation batch.

    Args:
        hooked: parameters with gradient hooks, which need this rank's own dense gradients.
        ignored: parameters that each rank has for itself.
    """
    trained = set(used_parameters(graph)).difference(ignored) if plan.world_size > 1 else ()
    late = tuple(d.parameter for d in plan if d.strategy in ("unused", "frozen") and d.parameter in trained)
    dense = {table.parameter for table in graph.tables if shard_blocker(table) is not None}
    whole = set(plan.sharded).intersection([*unshardable(graph), *hooked]) | (dense & set(plan.sharded)) - {*plan.heads}
    sparse = (table.parameter for table in graph.tables if table.parameter in late and table.has_sparse_gradient)
    return PlanViolation(late, tuple(sorted(whole)), sparse=tuple(sparse))


def fitted(plan: Plan, violations: Sequence[PlanViolation], why_whole: str = WHOLE) -> Plan:
    """Adds the needs of the ranks' batches to a plan; the result is the same on all ranks."""
    late = sorted({name for each in violations for name in each.late})
    whole = sorted({name for each in violations for name in each.whole})
    # No lookup reads a pruned or parametrized table directly.
    whole += [name for name in plan.sharded if any(name == old for old, _ in violations[0].renamed)]
    reasons = dict.fromkeys(late, LATE) | dict.fromkeys(whole, why_whole)
    sparse = {name for each in violations for name in each.sparse}
    reduced_as: Format = next((d.travels_as for d in plan if d.strategy == "allreduce"), "exact")
    marked = (replace(d, sparse=d.sparse or d.parameter in sparse) for d in plan)
    decisions = tuple(_reduced(d, reasons[d.parameter], reduced_as) if d.parameter in reasons else d for d in marked)
    spaces = (space_of(plan, [name for name in space.tables if name not in whole]) for space in plan.spaces)
    return replace(
        plan,
        decisions=decisions,
        buckets=(*plan.buckets, *((name,) for name in reasons)) if plan.world_size > 1 else (),
        spaces=tuple(space for space in spaces if len(space.tables) > 1),
    )


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Returns a plan with parameters renamed {old: new}; none of them is sharded."""
    return replace(
        plan,
        decisions=tuple(replace(d, parameter=names.get(d.parameter, d.parameter)) for d in plan),
        buckets=tuple(tuple(names.get(name, name) for name in bucket) for bucket in plan.buckets),
        renormed=tuple(name for name in plan.renormed if name not in names),
        watched=tuple(name for name in plan.watched if name not in names),
    )


def _reduced(decision: Decision, reason: str, travels_as: Format) -> Decision:
    return replace(
        decision,
        strategy="allgather" if decision.sparse else "allreduce",
        reason=reason,
        sent_bytes_per_step=decision.ddp_bytes_per_step,
        scheme="",
        grid=None,
        travels_as="exact" if decision.sparse else travels_as,
    )


def space_of(plan: Plan, tables: Sequence[str]) -> RowSpace:
    """Makes a row space of tables in this order."""
    return RowSpace.of(
        {name: plan[name].shape[0] for name in tables}, {name: plan[name].padding_idx for name in tables}
    )


def repeated(context: Context, graph: TrainingGraph, plan: Plan) -> Plan:
    """Returns the plan, with the schedule asked for, if it fits model, optimizers and ranks. Collective.

    Raises:
        ValueError: it does not fit on some rank; on every rank, with the first disagreement.
    """
    own = next(_disagreements(context, graph, plan), None)
    for found in context.communicator.reports(own).values():
        raise ValueError(
            f"plan=: the plan does not fit this model, optimizer or number of ranks: {found}. Save a plan of this run, "
            "or leave out plan=."
        )
    asked = context.options.schedule
    return plan if asked in (AUTO, plan.schedule_name) else replace(plan, schedule_name=asked, chosen_because="")


def _disagreements(context: Context, graph: TrainingGraph, plan: Plan) -> Iterator[str]:
    """Yields each disagreement between plan and model in a few words."""
    if plan.world_size != context.communicator.world_size:
        yield f"a plan for {plan.world_size} ranks on {context.communicator.world_size}"
    used = used_parameters(graph)
    facts = facts_of(context.model, context.stepping.holders, context.options.row_updates, used, {})
    planned, tables = {d.parameter: d for d in plan}, {table.parameter: table for table in graph.tables}
    if missing := planned.keys() ^ {fact.name for fact in facts}:
        yield f"parameters of the plan or of the model alone: {', '.join(sorted(missing)[:3])}"
        return
    options = context.options
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
            yield f"{fact.name} is unused in the plan, but gets a gradient from this batch"
        if decision.strategy not in SHARDED:
            continue
        blocker = shard_blocker(tables[fact.name]) if fact.name in tables else "no lookup reads it"
        if decision.strategy == "vocabulary":
            blocker = vocabulary_blocker(graph, fact.name)
        if blocker or fact.row_update_blocker:
            yield f"{fact.name} in shards, which cannot be: {blocker or fact.row_update_blocker}"
