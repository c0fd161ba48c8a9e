"""Adapts plans to batches and models: to what later batches need, and to renamed parameters.

A plan is made for the first batch. The needs of later ones are added to it on all ranks, without probing or pricing:
DDP with `find_unused_parameters` trains such models, and so does embrace_fx.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from embrace_fx.cost.wire import Format
from embrace_fx.passes.heads import Unmatched, forward_nodes, head_over
from embrace_fx.passes.planner.pricing import shard_blocker
from embrace_fx.vocabulary.graph import TrainingGraph, gradients_of, parameters_of
from embrace_fx.vocabulary.plan import Decision, Plan

LATE = "first used after the plan was made"
WHOLE = "on some rank, a batch or a gradient hook needs the whole table"
RENAMED = "the names of {} differ between ranks. Prune or parametrize the same modules on every rank"
NO_MOMENT = (
    "a batch uses {} differently from earlier batches and needs a new plan, but the plan cannot change now: {}. Before "
    "you call the model with this batch, run the backward of every earlier call. After no_sync(), also run a backward "
    "outside of it and optimizer.step(). If a backward needs several such calls, pass route='eager' to compile()"
)


@dataclass(frozen=True)
class PlanViolation:
    """What a batch needs that the current plan does not provide.

    Attributes:
        late: names of parameters that get a gradient although they are unused or frozen in the plan.
        whole: names of tables that the plan shards, but that the batch's forward reads in a way that requires the whole
            table.
        eager: the reason, in one line, why the batch's forward cannot be captured as a graph, or "" if it can.
        sparse: the tables of `late` whose gradients are sparse.
        renamed: (old, new) names of parameters that the model has renamed since the plan was made.
    """

    late: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    eager: str = ""
    sparse: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def names(self) -> tuple[str, ...]:
        """Returns the names of all parameters for which the plan must change."""
        return (*self.late, *self.whole, *(old for old, _ in self.renamed))

    def __bool__(self) -> bool:
        return bool(self.late or self.whole or self.eager or self.renamed)


def used_parameters(graph: TrainingGraph) -> frozenset[str]:
    """Returns the names of the parameters for which the graph computes a gradient."""
    return frozenset(gradients_of(graph.module))


def unshardable_tables(graph: TrainingGraph) -> Iterator[str]:
    """Yields the names of matrices that the graph reads in a way that prevents sharding."""
    tables = {table.parameter: table for table in graph.tables}
    forward = forward_nodes(graph)
    for name, node in parameters_of(graph.module).items():
        table = tables.get(name)
        if node.meta["val"].dim() != 2 or (table is not None and shard_blocker(table) is None):
            continue
        try:
            head_over(graph, node, forward)
        except Unmatched:
            yield name
        else:
            if table is not None and shard_blocker(replace(table, dense_users=())) is not None:
                yield name


def find_violation(
    plan: Plan, graph: TrainingGraph, hooked: Collection[str] = (), ignored: Collection[str] = ()
) -> PlanViolation:
    """Returns what the captured graph of a training or evaluation batch needs and a plan does not provide. The graph's
    `tables` must be known.

    Args:
        hooked: parameters with gradient hooks, which need this rank's own dense gradients.
        ignored: parameters that ranks do not synchronize.
    """
    trained = used_parameters(graph).difference(ignored) if plan.world_size > 1 else ()
    late = tuple(d.parameter for d in plan if d.strategy in ("unused", "frozen") and d.parameter in trained)
    dense = {table.parameter for table in graph.tables if shard_blocker(table) is not None}.difference(plan.heads)
    joined = {name for space in plan.spaces for name in space.tables}.intersection(trained)
    padded = {
        table.parameter
        for table in graph.tables
        if table.parameter in joined and any(use.padding_idx != plan[table.parameter].padding_idx for use in table.uses)
    }
    whole = {*unshardable_tables(graph), *hooked, *dense, *padded}.intersection(plan.sharded) if plan.sharded else ()
    sparse = (table.parameter for table in graph.tables if table.parameter in late and table.has_sparse_gradient)
    return PlanViolation(late, tuple(sorted(whole)), sparse=tuple(sparse))


def fit_plan(plan: Plan, violations: Sequence[PlanViolation], why_whole: str = WHOLE) -> Plan:
    """Returns a copy of a plan, changed to provide what the batches of all ranks need. The result is the same on all
    ranks.

    Args:
        violations: for each rank, what its batch needs and the plan does not provide.
        why_whole: the reason to record for tables that are no longer sharded.
    """
    late = sorted({name for each in violations for name in each.late})
    whole = sorted({name for each in violations for name in each.whole})
    # A renamed table was pruned or parametrized: lookups no longer read it directly.
    whole += [name for name in plan.sharded if any(name == old for old, _ in violations[0].renamed)]
    reasons = dict.fromkeys(late, LATE) | dict.fromkeys(whole, why_whole)
    sparse = {name for each in violations for name in each.sparse}
    reduced_as: Format = next((d.travels_as for d in plan if d.strategy == "allreduce"), "exact")

    def kept_whole(decision: Decision) -> Decision:
        """Returns the decision to keep a parameter whole, with its gradient all-reduced, or all-gathered if sparse."""
        by_rows = decision.sparse or decision.parameter in sparse
        return replace(
            decision,
            strategy="allgather" if by_rows else "allreduce",
            reason=reasons[decision.parameter],
            sent_bytes_per_step=decision.ddp_bytes_per_step,
            scheme="",
            grid=None,
            travels_as="exact" if by_rows else reduced_as,
            sparse=by_rows,
        )

    spaces = (plan.join_tables([name for name in space.tables if name not in whole]) for space in plan.spaces)
    return replace(
        plan,
        decisions=tuple(kept_whole(d) if d.parameter in reasons else d for d in plan),
        buckets=(*plan.buckets, *((name,) for name in reasons)) if plan.world_size > 1 else (),
        spaces=tuple(space for space in spaces if len(space.tables) > 1),
    )


def rename_parameters(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Returns a copy of a plan with renamed parameters.

    Args:
        names: maps old to new names. Renamed parameters must not be sharded.
    """
    return replace(
        plan,
        decisions=tuple(replace(d, parameter=names.get(d.parameter, d.parameter)) for d in plan),
        buckets=tuple(tuple(names.get(name, name) for name in bucket) for bucket in plan.buckets),
        renormed=tuple(name for name in plan.renormed if name not in names),
        watched=tuple(name for name in plan.watched if name not in names),
    )
