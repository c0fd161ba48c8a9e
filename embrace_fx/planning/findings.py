"""Gathers every rank's report of its batch; rank 0 decides the plan by them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from embrace_fx.cost.links import Cluster
from embrace_fx.cost.sparsity import Sparsity, measure
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.pricing import Findings, ParameterFacts
from embrace_fx.planning.fitting import WHOLE, unshardable
from embrace_fx.planning.links import links_between
from embrace_fx.planning.reads import Read, grid_rows, reads_of, used_parameters
from embrace_fx.runtime.ranks.failure import PeerFailure, failure_text
from embrace_fx.runtime.tables.holders import Holders
from embrace_fx.runtime.tables.part import Part
from embrace_fx.runtime.tables.pending_parameters import is_held_by_torch, share_memory
from embrace_fx.setup.options import Options
from embrace_fx.setup.setting import Setting
from embrace_fx.setup.telling import stage
from embrace_fx.vocabulary.exactness import STILL, Moving, RowUpdatesOption, needs_whole, semantics
from embrace_fx.vocabulary.graph import Table, TrainingGraph
from embrace_fx.vocabulary.plan import LinksAre, Plan
from embrace_fx.vocabulary.row_wise import RowWiseAdagrad
from embrace_fx.vocabulary.schedule import AUTO, FULL

MOST_GATHERED_IDS = 2**22
"""Most ids of one table, of all ranks together, that every rank receives at set-up: 16 MiB."""

SHARED = (
    "its data, a view, an array or another tensor that is kept has its memory: it would not see the table train; "
    "let go of that, or make the table of a clone, to shard it"
)
HOOKED = "the communication hook reduces whole gradients"


def make_plan(
    setting: Setting, graph: TrainingGraph, leaves: Sequence[Any], known: Cluster | None = None
) -> tuple[Plan, Findings | None]:
    """Makes the plan for a training batch: every rank measures, rank 0 decides, all get the same plan.

    Args:
        known: the links, where they have been probed.

    Returns: the plan, and on rank 0 its findings.

    Raises:
        PeerFailure: a rank's batch is bad, on every rank.
        ValueError: the strategy asked for does not fit the model, on every rank.
    """
    findings = find(setting, graph, leaves, frozenset())
    return plan_on_links(setting, findings, None, known=known), findings


def plan_on_links(
    setting: Setting, findings: Findings | None, current: Plan | None, *, known: Cluster | None = None
) -> Plan:
    """Returns rank 0's plan for the given links, or for links probed where a step sends enough. Collective.

    Args:
        findings: on rank 0; None on others.
        current: the plan in use, if any.
        known: the links, where they have been probed.

    Raises:
        ValueError: the strategy asked for does not fit the model, on every rank.
    """
    if setting.options.cluster is not None:
        return _agree_on_plan(setting, findings, (setting.options.cluster, "given"), current)
    known = known or (current.links if current is not None and current.links_are == "probed" else None)
    if known is not None:
        return _agree_on_plan(setting, findings, (known, "probed"), current)
    plan = _agree_on_plan(setting, findings, (Cluster(), "assumed"), current)
    probed = _probed(setting, plan)
    return plan if probed is None else _agree_on_plan(setting, findings, (probed, "probed"), current)


def find(
    setting: Setting, graph: TrainingGraph, leaves: Sequence[Any], used: Collection[str], schedule: str = ""
) -> Findings | None:
    """Gathers on rank 0 the rows that a batch reads on all ranks. Collective.

    Args:
        used: parameters that got a gradient from earlier batches.
        schedule: the schedule to price; "": the one in use.

    Raises:
        PeerFailure: a rank's batch is bad, on every rank.
    """
    reads, failure = {}, None
    try:
        ranks = setting.communicator.rank, setting.communicator.world_size
        reads = reported(reads_of(setting.state, graph, leaves), *ranks)
    except Exception as error:  # the batch may be bad, on this rank alone
        failure = failure_text(error)
    whole = dict.fromkeys(sorted({*unshardable(graph), *setting.state.hooked}), WHOLE)
    weights = {table.parameter: setting.state.parameter(table.parameter) for table in graph.tables}
    for name, weight in weights.items():
        if not isinstance(weight, Part) and (share_memory([weight]) or is_held_by_torch(weight)):
            whole[name] = SHARED
    own = _Report(tuple(sorted(used_parameters(graph))), whole, reads, failure)
    everyone = setting.communicator.gather(own, _Report)
    if failures := {rank: report.failure for rank, report in enumerate(everyone) if report.failure is not None}:
        raise PeerFailure(failures)
    if setting.communicator.rank:
        return None
    return _findings(setting, graph, everyone, used, schedule or setting.options.schedule)


def _probed(setting: Setting, plan: Plan) -> Cluster | None:
    """Probes the links between the ranks; None where a step sends too little to be cut. Collective."""
    with stage("probing links", setting.communicator.rank):
        return links_between(setting.communicator, plan.sent_bytes_per_step, setting.device)


def _agree_on_plan(
    setting: Setting,
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
    plan = setting.communicator.gather(plan, Plan | str | None)[0]
    if isinstance(plan, str):
        raise ValueError(plan)
    assert plan is not None
    return plan


def _findings(
    setting: Setting, graph: TrainingGraph, everyone: list[_Report], used: Collection[str], schedule: str
) -> Findings:
    """Makes the findings from the reports of all ranks."""
    used = set(used).union(*(report.used for report in everyone))
    sharded = {name: table.shape for name, table in setting.state.tables.items()}
    facts = facts_of(setting.model, setting.stepping.holders, setting.options.row_updates, used, sharded)
    facts = tuple(replace(f, local=f.name in setting.state.ignored) for f in facts)
    blocked = {name: reason for report in everyone for name, reason in report.whole.items()}
    facts = tuple(replace(f, row_update_blocker=blocked[f.name]) if f.name in blocked else f for f in facts)
    options = replace(setting.options, schedule=schedule)
    ranks, reads = setting.communicator.world_size, [report.reads for report in everyone]
    findings = findings_of(graph, facts, reads, ranks, options)
    if setting.communicator.comm_hook is None:
        return findings
    dense = replace(graph, tables=tuple(table.with_dense_gradient() for table in graph.tables))
    return replace(findings.with_whole([*findings.rows], HOOKED), strategy="allreduce", graph=dense)


def findings_of(
    graph: TrainingGraph,
    facts: tuple[ParameterFacts, ...],
    reads: Sequence[Mapping[str, Reported]],
    ranks: int,
    options: Options,
) -> Findings:
    """Makes findings from what batches read.

    Args:
        reads: of each rank, or of fewer: then the others read as many rows as the mean, and nothing is known of their
            ids.
    """
    names = [table.parameter for table in graph.tables]
    rows = {name: tuple(own[name].rows if name in own else 0 for own in reads) for name in names}
    rows = {name: (*of, *[round(sum(of) / len(of))] * (ranks - len(of))) for name, of in rows.items()}
    known = [t for t in graph.tables if len(reads) == ranks and all(t.parameter in own for own in reads)]
    told = {table.parameter: [own[table.parameter] for own in reads] for table in known}
    local_rows = {
        name: {each: tuple(own.local_rows[each] for own in of) for each in grid_rows(ranks)}
        for name, of in told.items()
    }
    lies = {table.parameter: _sparsity(table, told[table.parameter]) for table in known}
    sparsity = {name: found for name, found in lies.items() if found is not None}
    schedule = options.schedule
    if schedule == AUTO and options.table_memory is not None:
        schedule = FULL  # reads of rows beyond memory, which no price knows, overlap steps
    return Findings(graph, facts, rows, ranks, options.strategy, schedule, sparsity, local_rows, options.rows)


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
        )
        for name, parameter in model.named_parameters()
        for kinds in [[type(optimizer) for optimizer, _ in holders.of(parameter)]]
    )


def _moving(holders: Holders, parameter: nn.Parameter, row_updates: RowUpdatesOption) -> Moving:
    """Decides how rows without gradient are updated. An optimizer that is not known yet counts as an Adam."""
    way = holders.moving(parameter, semantics(row_updates))
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
    table; or why measuring failed.
    """

    used: tuple[str, ...]
    whole: dict[str, str]
    reads: dict[str, Reported]
    failure: str | None


def reported(reads: Mapping[str, Read], rank: int, ranks: int) -> dict[str, Reported]:
    """Makes a rank's report of the rows that its batch reads."""
    found = {}
    for name, read in reads.items():
        ids = read.drawn.unique().cpu()
        told = _narrow(ids) if ids.numel() <= MOST_GATHERED_IDS // ranks else None
        found[name] = Reported(read.rows, told, read.drawn.numel(), read.local_rows(rank, ranks))
    return found


def _narrow(ids: Tensor) -> Tensor:
    return ids.to(torch.int32) if ids.numel() and int(ids.max()) < 2**31 else ids


def _sparsity(table: Table, everyone: Sequence[Reported]) -> Sparsity | None:
    """Measures the sparsity of a table's gradients on all ranks; None unless every rank reported its ids."""
    ids = [own.ids.to(torch.int64) for own in everyone if own.ids is not None]
    if len(ids) < len(everyone):
        return None
    inside = [own[(own >= 0) & (own < table.num_rows)] for own in ids]  # the step itself reports ids outside
    draws = sum(own.draws for own in everyone)
    return measure(inside, table.num_rows, table.embedding_dim, table.dtype.itemsize, draws)
