"""Counts the rows that a batch reads, and gathers the counts of all ranks; rank 0 decides the plan by them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from embrace_fx.cost.links import Cluster
from embrace_fx.cost.sparsity import Sparsity, measure
from embrace_fx.passes.heads import forward_of, labels_in_batch, means_of_labels
from embrace_fx.passes.partition import extract_ids, extract_values
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.pricing import Findings, ParameterFacts, shard_blocker, vocabulary_blocker
from embrace_fx.runtime.kernels import unique_ids
from embrace_fx.runtime.probe.links import links_between
from embrace_fx.runtime.ranks.failure import PeerFailure, failure_text
from embrace_fx.runtime.step.phases import reader
from embrace_fx.runtime.tables.holders import Holders
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.part import Part
from embrace_fx.runtime.tables.pending_parameters import is_held_by_torch, share_memory
from embrace_fx.setup.context import Context
from embrace_fx.setup.log import stage
from embrace_fx.setup.options import Options
from embrace_fx.vocabulary.exactness import STILL, Moving, RowUpdatesOption, needs_whole, semantics
from embrace_fx.vocabulary.graph import Table, TrainingGraph, gradients_of, parameters_of
from embrace_fx.vocabulary.plan import Grid, LinksAre, Plan
from embrace_fx.vocabulary.random_state import random_state_kept
from embrace_fx.vocabulary.row_wise import RowWiseAdagrad
from embrace_fx.vocabulary.schedule import AUTO, FULL

MOST_GATHERED_IDS = 2**22
"""Most ids of one table, of all ranks together, that every rank receives at set-up: 16 MiB."""

SHARED = (
    "its data, a view, an array or another tensor that is kept has its memory: it would not see the table train; "
    "let go of that, or make the table of a clone, to shard it"
)
WHOLE = "a batch, or a gradient hook, needs it whole on some rank"
HOOKED = "the communication hook reduces whole gradients"


def plan_on_links(
    context: Context, findings: Findings | None, current: Plan | None, *, known: Cluster | None = None
) -> Plan:
    """Returns rank 0's plan for the given links, or for links probed where a step sends enough. Collective.

    Args:
        findings: on rank 0; None on others.
        current: the plan in use, if any.
        known: the links, where they have been probed.

    Raises:
        ValueError: the strategy asked for does not fit the model, on every rank.
    """
    if context.options.cluster is not None:
        return _agree_on_plan(context, findings, (context.options.cluster, "given"), current)
    known = known or (current.links if current is not None and current.links_are == "probed" else None)
    if known is not None:
        return _agree_on_plan(context, findings, (known, "probed"), current)
    plan = _agree_on_plan(context, findings, (Cluster(), "assumed"), current)
    with stage("probing links", context.communicator.rank):
        probed = links_between(context.communicator, plan.sent_bytes_per_step, context.device)
    return plan if probed is None else _agree_on_plan(context, findings, (probed, "probed"), current)


def find(
    context: Context, graph: TrainingGraph, leaves: Sequence[Any], used: Collection[str], schedule: str = ""
) -> Findings | None:
    """Gathers on rank 0 the rows that a batch reads on all ranks. Collective.

    Args:
        used: parameters that got a gradient from earlier batches.
        schedule: the schedule to price; "": the one in use.

    Raises:
        PeerFailure: a rank's batch is bad, on every rank.
    """
    reads, scored, failure = {}, {}, None
    try:
        ranks = context.communicator.rank, context.communicator.world_size
        reads = reported(reads_of(context.state, graph, leaves), *ranks)
        scored = scored_of(context.state, graph, leaves)
    except Exception as error:  # the batch may be bad, on this rank alone
        failure = failure_text(error)
    whole = dict.fromkeys(sorted({*unshardable(graph), *context.state.hooked}), WHOLE)
    weights = {table.parameter: context.state.parameter(table.parameter) for table in graph.tables}
    for name, weight in weights.items():
        if not isinstance(weight, Part) and (share_memory([weight]) or is_held_by_torch(weight)):
            whole[name] = SHARED
    own = _Report(tuple(sorted(used_parameters(graph))), whole, reads, scored, failure)
    everyone = context.communicator.gather(own, _Report)
    if failures := {rank: report.failure for rank, report in enumerate(everyone) if report.failure is not None}:
        raise PeerFailure(failures)
    if context.communicator.rank:
        return None
    return _findings(context, graph, everyone, used, schedule or context.options.schedule)


def _agree_on_plan(
    context: Context,
    findings: Findings | None,
    links: tuple[Cluster, LinksAre],
    current: Plan | None,
) -> Plan:
    """Returns, on every rank, the plan that rank 0 decides."""
    plan: Plan | str | None = None
    if findings is not None:
        try:
            plan = decide(findings, links[0], current, links[1])
        except Exception as error:  # the other ranks wait for an answer
            plan = str(error) if isinstance(error, ValueError) else failure_text(error)
    plan = context.communicator.gather(plan, Plan | str | None)[0]
    if isinstance(plan, str):
        raise ValueError(plan)
    assert plan is not None
    return plan


def _findings(
    context: Context, graph: TrainingGraph, everyone: list[_Report], used: Collection[str], schedule: str
) -> Findings:
    """Makes the findings from the reports of all ranks."""
    used = set(used).union(*(report.used for report in everyone))
    sharded = {name: table.shape for name, table in context.state.tables.items()}
    facts = facts_of(context.model, context.stepping.holders, context.options.row_updates, used, sharded)
    facts = tuple(replace(f, local=f.name in context.state.ignored) for f in facts)
    blocked = {name: reason for report in everyone for name, reason in report.whole.items()}
    facts = tuple(replace(f, row_update_blocker=blocked[f.name]) if f.name in blocked else f for f in facts)
    options = replace(context.options, schedule=schedule)
    ranks, reads = context.communicator.world_size, [report.reads for report in everyone]
    findings = findings_of(graph, facts, reads, ranks, options, [report.scored for report in everyone])
    if context.communicator.comm_hook is None:
        return findings
    dense = replace(graph, tables=tuple(table.with_dense_gradient() for table in graph.tables))
    return replace(findings.with_whole([*findings.rows], HOOKED), strategy="allreduce", graph=dense)


def findings_of(
    graph: TrainingGraph,
    facts: tuple[ParameterFacts, ...],
    reads: Sequence[Mapping[str, Reported]],
    ranks: int,
    options: Options,
    scored: Sequence[Mapping[str, int]],
) -> Findings:
    """Makes findings from what batches read.

    Args:
        reads: of each rank, or of fewer: then the others read as many rows as the mean, and nothing is known of their
            ids.
        scored: what `scored_of` counts, likewise.
    """
    names = [table.parameter for table in graph.tables]
    rows = {name: tuple(own[name].rows if name in own else 0 for own in reads) for name in names}
    rows = {name: (*of, *[round(sum(of) / len(of))] * (ranks - len(of))) for name, of in rows.items()}
    known = [t for t in graph.tables if len(reads) == ranks and all(t.parameter in own for own in reads)]
    known_reads = {table.parameter: [own[table.parameter] for own in reads] for table in known}
    local_rows = {
        name: {each: tuple(own.local_rows[each] for own in of) for each in grid_rows(ranks)}
        for name, of in known_reads.items()
    }
    lies = {table.parameter: _sparsity(table, known_reads[table.parameter]) for table in known}
    sparsity = {name: found for name, found in lies.items() if found is not None}
    schedule = options.schedule
    if schedule == AUTO and options.table_memory is not None:
        schedule = FULL  # prices ignore reads of rows beyond memory, which overlap steps
    return Findings(
        graph,
        facts,
        rows,
        ranks,
        options.strategy,
        schedule,
        sparsity,
        local_rows,
        options.rows,
        options.memory_budget is not None,
        {name: tuple(own[name] for own in scored) for name in scored[0] if all(name in own for own in scored)},
    )


def unshardable(graph: TrainingGraph) -> Iterator[str]:
    """Yields the parameters that a graph reads in a way shards cannot be read, by lookups or by an output layer."""
    tables = {table.parameter: table for table in graph.tables}
    forward = forward_of(graph)
    for name in parameters_of(graph.module):
        is_blocked = name not in tables or shard_blocker(tables[name]) is not None
        if is_blocked and vocabulary_blocker(graph, name, forward) is not None:
            yield name


def facts_of(
    model: nn.Module,
    holders: Holders,
    row_updates: RowUpdatesOption,
    used: Collection[str],
    sharded: Mapping[str, torch.Size],
) -> tuple[ParameterFacts, ...]:
    """Collects the facts about every parameter that the planner needs.

    Args:
        holders: the optimizers known so far.
        used: parameters that get a gradient.
        sharded: sharded table -> its whole shape.
    """
    every = enumerate(group for optimizer in holders.optimizers for group in optimizer.param_groups)
    groups = {id(parameter): k for k, group in every for parameter in group["params"]}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(
        ParameterFacts(
            name,
            tuple(sharded.get(name, parameter.shape)),
            parameter.element_size(),
            parameter.requires_grad,
            name in used,
            next(filter(None, map(needs_whole, kinds)), None),
            groups.get(id(parameter), -1),
            _moving(holders, parameter, row_updates),
            adds_up_norms=RowWiseAdagrad in kinds,
            tied=tuple(names[id(parameter)][1:]),
        )
        for name, parameter in model.named_parameters()
        for kinds in [[type(optimizer) for optimizer, _ in holders.of(parameter)]]
    )


def _moving(holders: Holders, parameter: nn.Parameter, row_updates: RowUpdatesOption) -> Moving:
    """Decides how rows without gradient are updated. An optimizer that is not known yet counts as an Adam."""
    way = holders.dense_update_policy(parameter, semantics(row_updates))
    return row_updates if way not in STILL and row_updates in ("sweep", "replay") else way


@dataclass(frozen=True)
class Reported:
    """One rank's report of a table: the number of unique rows, the ids with a gradient (None: too many), how many ids
    the batch has, and rows of a grid -> how many rows would be in the rank's own row of it.
    """

    rows: int
    ids: Tensor | None
    draws: int
    local_rows: dict[int, int]


@dataclass(frozen=True)
class _Report:
    """One rank's report of its batch: parameters with a gradient, why some cannot be sharded, the rows read of each
    table, the positions that an output layer's loss scores; or why measuring failed.
    """

    used: tuple[str, ...]
    whole: dict[str, str]
    reads: dict[str, Reported]
    scored: dict[str, int]
    failure: str | None


def reported(reads: Mapping[str, Read], rank: int, ranks: int) -> dict[str, Reported]:
    """Makes a rank's report of the rows that its batch reads."""
    found = {}
    for name, read in reads.items():
        ids = read.drawn.unique().cpu()
        sent_ids = _narrow(ids) if ids.numel() <= MOST_GATHERED_IDS // ranks else None
        found[name] = Reported(read.rows, sent_ids, read.drawn.numel(), read.local_rows(rank, ranks))
    return found


def _narrow(ids: Tensor) -> Tensor:
    return ids.to(torch.int32) if ids.numel() and int(ids.max()) < 2**31 else ids


def _sparsity(table: Table, everyone: Sequence[Reported]) -> Sparsity | None:
    """Measures the sparsity of a table's gradients on all ranks; None unless every rank reported its ids."""
    ids = [own.ids.to(torch.int64) for own in everyone if own.ids is not None]
    if len(ids) < len(everyone):
        return None
    inside = [own[(own >= 0) & (own < table.num_rows)] for own in ids]  # the step reports ids outside of the table
    draws = sum(own.draws for own in everyone)
    return measure(inside, table.num_rows, table.embedding_dim, table.dtype.itemsize, draws)


@dataclass(frozen=True)
class Read:
    """The rows that one batch reads of one table.

    Attributes:
        rows: number of unique rows, always with the padding row, which travels even if the batch does not hold it.
        drawn: (T,) all ids of the batch that get a gradient, with duplicates.
        unique: (rows,) the unique rows.
    """

    rows: int
    drawn: Tensor
    unique: Tensor

    def local_rows(self, rank: int, ranks: int) -> dict[int, int]:
        """Counts, for each grid, how many rows are in this rank's own row of it: rows of the grid -> count."""
        sizes = {each: Grid(each, ranks // each) for each in grid_rows(ranks)}
        return {each: int((self.unique % each == grid.place(rank)[0]).sum()) for each, grid in sizes.items()}


def grid_rows(ranks: int) -> list[int]:
    """Lists the numbers of rows, beyond one, that a grid of this many ranks can have."""
    return [each for each in range(2, ranks + 1) if ranks % each == 0]


def used_parameters(graph: TrainingGraph) -> set[str]:
    """Names the parameters that get a gradient from the graph."""
    return {*gradients_of(graph.module)}


def reads_of(state: ModelState, graph: TrainingGraph, leaves: Sequence[Any]) -> dict[str, Read]:
    """Counts the rows that a batch reads, by table, by running the graph that computes its ids."""
    tables = [t for t in graph.tables if all(use.ids_from_batch for use in t.uses)]
    if not tables:
        return {}
    ids = iter(_run(state, extract_ids(graph, tables), leaves))
    reads = {}
    for table in tables:
        of_uses = [next(ids) for _ in table.uses]
        unique = unique_ids(of_uses, table.num_rows, table.uses[0].padding_idx)[0]
        drawn = [
            own[own != use.padding_idx] for own, use in zip((i.reshape(-1) for i in of_uses), table.uses, strict=True)
        ]
        reads[table.parameter] = Read(unique.numel(), torch.cat(drawn).to(torch.int64), unique)
    return reads


def scored_of(state: ModelState, graph: TrainingGraph, leaves: Sequence[Any]) -> dict[str, int]:
    """Counts the positions of a batch that losses of output layers score, by table."""
    found = labels_in_batch(graph)
    if not found:
        return {}
    labels = _run(state, extract_values(graph, [node for node, _ in found.values()]), leaves)
    return {name: int((own != ignored).sum()) for (name, (_, ignored)), own in zip(found.items(), labels, strict=True)}


def scores_nothing(state: ModelState, graph: TrainingGraph, leaves: Sequence[Any]) -> bool:
    """Returns whether a loss is the mean over labels of which a batch has none: nan, with gradients of zero."""
    labels = means_of_labels(graph)
    if not labels:
        return False
    found = _run(state, extract_values(graph, [node for node, _ in labels]), leaves)
    return any(bool((own == ignored).all()) for own, (_, ignored) in zip(found, labels, strict=True))


def _run(state: ModelState, module: fx.GraphModule, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Computes what a batch alone decides, and leaves the random state to its step, which draws the same numbers."""
    parameter = state.any_parameter()
    device = torch.device("cpu") if parameter is None else parameter.device
    with random_state_kept(device), torch.no_grad():
        return reader(module, state)(leaves)
