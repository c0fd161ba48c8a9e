"""Fits a plan to batches that use a parameter for the first time, or read a sharded table densely.

A plan is made for the first batch. The needs of later ones are added to it on all ranks, without probing or pricing:
DDP with `find_unused_parameters` trains such models, and so does embrace_fx.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from embrace_fx.cost.wire import Format
from embrace_fx.passes.planner.pricing import shard_blocker
from embrace_fx.planning.reads import used_parameters
from embrace_fx.vocabulary.graph import TrainingGraph, parameters_of
from embrace_fx.vocabulary.plan import Decision, Plan
from embrace_fx.vocabulary.row_space import RowSpace

LATE = "first used after the plan was made"
RENAMED = (
    "expected modules to hold parameters by the same names on every rank, in the model's call, found that {} have got "
    "others on some: prune, or parametrize, on every rank"
)
NO_MOMENT = (
    "expected every call's backward, and under no_sync() the step, before a batch that needs another plan, in the "
    "model's call, found that {} are used otherwise than before, and {}. Call the model once with a batch that uses "
    "them, on its own"
)
WHOLE = "a batch, or a gradient hook, needs it whole on some rank"


@dataclass(frozen=True)
class Misfit:
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


def misfit(plan: Plan, graph: TrainingGraph, hooked: Collection[str] = (), ignored: Collection[str] = ()) -> Misfit:
    """Compares a plan with a captured graph (tables found) of a training or evaluation batch.

    Args:
        hooked: parameters with gradient hooks, which need this rank's own dense gradients.
        ignored: parameters that each rank has for itself.
    """
    trained = set(used_parameters(graph)).difference(ignored) if plan.world_size > 1 else ()
    late = tuple(d.parameter for d in plan if d.strategy in ("unused", "frozen") and d.parameter in trained)
    whole = tuple(sorted(set(plan.sharded).intersection([*unshardable(graph), *hooked])))
    sparse = (table.parameter for table in graph.tables if table.parameter in late and table.has_sparse_gradient)
    return Misfit(late, whole, sparse=tuple(sparse))


def unshardable(graph: TrainingGraph) -> Iterator[str]:
    """Yields the parameters that a graph reads in a way shards cannot be read."""
    tables = {table.parameter: table for table in graph.tables}
    for name in parameters_of(graph.module):
        if name not in tables or shard_blocker(tables[name]) is not None:
            yield name


def fitted(plan: Plan, misfits: Sequence[Misfit], why_whole: str = WHOLE) -> Plan:
    """Adds the needs of the ranks' batches to a plan; the result is the same on all ranks."""
    late = sorted({name for each in misfits for name in each.late})
    whole = sorted({name for each in misfits for name in each.whole})
    # A table that is pruned, or parametrized, is read by a lookup no more.
    whole += [name for name in plan.sharded if any(name == old for old, _ in misfits[0].renamed)]
    reasons = dict.fromkeys(late, LATE) | dict.fromkeys(whole, why_whole)
    sparse = {name for each in misfits for name in each.sparse}
    reduced_as: Format = next((d.travels_as for d in plan if d.strategy == "allreduce"), "exact")
    told = (replace(d, sparse=d.sparse or d.parameter in sparse) for d in plan)
    decisions = tuple(_reduced(d, reasons[d.parameter], reduced_as) if d.parameter in reasons else d for d in told)
    spaces = (space_of(plan, [name for name in space.tables if name not in whole]) for space in plan.spaces)
    return replace(
        plan,
        decisions=decisions,
        buckets=(*plan.buckets, *((name,) for name in reasons)) if plan.world_size > 1 else (),
        spaces=tuple(space for space in spaces if len(space.tables) > 1),
    )


def renamed(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Returns a plan with other names for parameters, of which none is sharded: {old: new}."""
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
    return RowSpace.of({name: plan[name].shape[0] for name in tables})
