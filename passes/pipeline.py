"""Runs the pipeline of passes, from a captured graph and a plan to the graphs that run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import perf_counter

from torch import fx

from embrace_fx.passes.dropout import EagerDropout
from embrace_fx.passes.join_exchanges import JoinExchanges
from embrace_fx.passes.join_tables import JoinTables
from embrace_fx.passes.memory.budget import Memory
from embrace_fx.passes.memory.recompute_cheap import RecomputeCheap
from embrace_fx.passes.memory.regions import RecomputeRegions
from embrace_fx.passes.narrow import NarrowExchange
from embrace_fx.passes.overlap.await_late import AwaitRowsLate
from embrace_fx.passes.overlap.buckets import ChunkBuckets, UpdateBeforeRead
from embrace_fx.passes.overlap.rows import SubmitRows
from embrace_fx.passes.overlap.split import SplitRows
from embrace_fx.passes.overlap.submit_early import SubmitGradientsEarly
from embrace_fx.passes.partition import Partition
from embrace_fx.passes.reduce import ReduceGradients
from embrace_fx.passes.round_gradients import RoundRowGradients
from embrace_fx.passes.shard import ShardTables
from embrace_fx.passes.shard_head import ShardHeads
from embrace_fx.passes.sparse_gradients import SparseGradients
from embrace_fx.passes.tables import find_tables
from embrace_fx.passes.verifier.invariants import VerificationError, verify
from embrace_fx.vocabulary.graph import TrainingGraph, results_behind
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import INTO_FORWARD, LOOKS_AHEAD, Cuts

Pass = Callable[[TrainingGraph], TrainingGraph]


@dataclass(frozen=True)
class CompiledGraph:
    """The result of running passes: the final graph, with a snapshot of the graph after each pass.

    Attributes:
        graph: the graph after the last pass.
        graphs: maps the name of each pass to the graph after the pass, and then the name of each phase to its final
            graph.
        phases: maps the name of each pass to the phases after the pass, if the graph is partitioned.
        ms: name of a pass -> its milliseconds.
    """

    graph: TrainingGraph
    graphs: dict[str, fx.GraphModule]
    phases: dict[str, dict[str, fx.GraphModule]] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)

    def describe_times(self) -> str:
        """Returns the milliseconds of each pass as text, one line per pass."""
        return "\n".join(f"{ms:10.2f} ms  {name}" for name, ms in self.ms.items())


def with_tables(graph: TrainingGraph) -> TrainingGraph:
    """Returns a copy of a captured graph that records the graph's embedding tables and, for each parameter, the results
    through which the parameter gets a gradient.
    """
    return replace(graph, tables=find_tables(graph), results_behind=results_behind(graph))


def training_passes(
    plan: Plan,
    present: Collection[str],
    rank: int,
    *,
    reduce: bool = True,
    join: JoinExchanges | None = None,
    memory: Memory | None = None,
) -> tuple[Pass, ...]:
    """Returns the passes that turn a captured graph into a distributed training step, in order.

    Args:
        present: names of tables that the graph reads; an evaluation may read fewer than training does.
        rank: this rank.
        reduce: whether to reduce gradients; False for a backward under `no_sync` and for a forward alone.
        join: the pass with which a rank takes part in exchanges of parameters that only other ranks' batches use. None
            for a forward alone.
        memory: the pass that keeps the step within a memory budget, or None without a budget.
    """
    joined = join.exchanged if join is not None else ()  # a single process exchanges nothing
    exchanged = plan.row_exchanges.items()
    sharded = tuple(name for name, tables in exchanged if any(t in present or t in joined for t in tables))
    renormed = tuple(name for name in plan.renormed if name in present)
    return (
        *((join,) if join is not None else ()),  # adds exchanges of parameters that this batch does not use
        *((JoinTables(plan.spaces),) if plan.spaces else ()),  # joins groups of tables to one table each
        ShardHeads(plan.heads, rank, plan.world_size, memory is None),  # shards the output layers over sharded tables
        EagerDropout(),  # on the CPU, draws dropout's noise as eager mode does
        # replaces tables by shards, and lookups by AlltoAlls of rows
        ShardTables(sharded, renormed, rank, plan.world_size, plan.grids, in_order=not reduce, rows=plan.rows),
        NarrowExchange(),  # sends rows in the narrow dtype of an autocast region
        # rounds row gradients to fewer bits
        *((RoundRowGradients(plan.rows_as),) if plan.rows_as != "exact" else ()),
        # keeps the gradients of whole tables sparse if their module has sparse=True
        *((SparseGradients(plan.sparse, plan.exchanged if reduce else ()),) if join is not None else ()),
        # reduces dense gradients, in buckets or by sparse exchanges
        ReduceGradients(
            plan.buckets if reduce else (),
            plan.world_size,
            {name: (plan[name].strategy, plan[name].scheme) for name in plan.exchanged},
        ),
        RecomputeRegions(),  # recomputes checkpointed regions in the backward
        # recomputes or offloads as a memory budget requires, or recomputes only cheap values
        memory if memory is not None else RecomputeCheap(plan.links.compute),
        Partition(),  # splits the graph into unique, ids, forward and backward
    )


def overlap_passes(plan: Plan, schedule: str, rank: int, cuts: Cuts) -> tuple[Pass, ...]:
    """Returns the passes that overlap communication with the next step. They run after `training_passes`.

    Args:
        schedule: name of the schedule, one of `embrace_fx.vocabulary.schedule.SCHEDULES`.
        rank: this rank.
        cuts: the sizes of the chunks of buckets, and the numbers of pieces of delayed gradients (those of rows that the
            next batch does not read).
    """
    if schedule == "none" or not (plan.divided or plan.buckets):  # a single process exchanges nothing
        return ()
    vertical = (SplitRows(cuts.pieces),) if schedule in LOOKS_AHEAD else ()
    horizontal = (UpdateBeforeRead(plan.buckets, cuts.chunks),) if schedule in INTO_FORWARD else ()
    return (
        SubmitRows(tuple(plan.heads)),  # submits, awaits and applies rows and their gradients
        *vertical,  # splits rows into early and late, gradients into prior and delayed
        ChunkBuckets(cuts.chunks),  # sends buckets in chunks
        *horizontal,  # updates buckets right before the next forward reads them
        AwaitRowsLate(),  # awaits rows at their first use
        SubmitGradientsEarly(),  # submits row gradients as soon as they are computed
    )


def run_passes(analysed: TrainingGraph, passes: Iterable[Pass], earlier: CompiledGraph | None = None) -> CompiledGraph:
    """Runs the passes on the graph `analysed` and verifies the final graph. Returns it with a snapshot after each pass.

    Args:
        earlier: the result of passes that have already run on `analysed`, or None. The passes continue from it.

    Raises:
        VerificationError: a pass broke an invariant; the message names the pass.
    """
    graph = start = earlier.graph if earlier else analysed
    changed: list[tuple[str, TrainingGraph]] = []
    graphs = {**earlier.graphs} if earlier else {"captured": analysed.module}
    phases, ms = ({**earlier.phases}, {**earlier.ms}) if earlier else ({}, {})
    for name in graph.phases:
        del graphs[name]  # delete and add again, so that the phases come last
    for each in passes:
        began = perf_counter()
        before, graph = graph, each(graph)
        name = type(each).__name__
        if graph is not before:
            changed.append((name, graph))
        graphs[_to_snake_case(name)] = graph.module
        ms[_to_snake_case(name)] = (perf_counter() - began) * 1e3
        if graph.phases:
            phases[_to_snake_case(name)] = dict(graph.phases)
    _verify(changed, analysed, start)
    graphs.update(graph.phases)
    return CompiledGraph(graph, graphs, phases, ms)


def _verify(changed: Sequence[tuple[str, TrainingGraph]], captured: TrainingGraph, analysed: TrainingGraph) -> None:
    """Verifies the last graph of `changed`. If it is invalid, verifies each graph in turn, so that the error names the
    pass that broke it.

    Verifying every graph in every run took a sixth of all Python calls when planning twelve layers.

    Args:
        changed: (name of a pass, graph after it) for each pass that has changed the graph.
        captured: the graph before all passes.
        analysed: the graph before the passes of `changed`.
    """
    try:
        if changed:
            name, graph = changed[-1]
            verify(graph, after=name, captured=captured, previous=analysed)
    except VerificationError:
        for (_, before), (name, graph) in pairwise([("", analysed), *changed]):
            verify(graph, after=name, captured=captured, previous=before)
        raise


def _to_snake_case(name: str) -> str:
    """Converts a class name to snake case: `ShardTables` to `shard_tables`."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
