"""Makes the plan for a batch: gathers which rows all ranks read, from which rank 0 decides. Or checks a given plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from embrace_fx.cost.links import Cluster
from embrace_fx.cost.sparsity import Sparsity, measure_sparsity
from embrace_fx.passes.heads import labels_in_batch, mean_loss_labels
from embrace_fx.passes.partition import extract_ids, extract_values
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.plan_fit import WHOLE, unshardable_tables, used_parameters
from embrace_fx.passes.planner.pricing import Findings, ParameterFacts, head_sharding_blocker, shard_blocker
from embrace_fx.runtime.kernels import unique_ids
from embrace_fx.runtime.probe.links import measure_links
from embrace_fx.runtime.probe.probe import estimate_links
from embrace_fx.runtime.ranks.failure import PeerFailure, failure_text
from embrace_fx.runtime.step.runnable_phase import make_reader
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.pending_parameters import is_held_by_torch, memory_is_shared
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.runtime.tables.update_rule import KnownOptimizers
from embrace_fx.setup.context import Context
from embrace_fx.setup.log import stage
from embrace_fx.setup.options import Options
from embrace_fx.vocabulary.exactness import (
    STILL,
    DenseUpdatePolicy,
    RowUpdatesOption,
    row_update_semantics,
    whole_table_reason,
)
from embrace_fx.vocabulary.graph import TableSpec, TrainingGraph
from embrace_fx.vocabulary.plan import SHARDED, Grid, LinksAre, Plan
from embrace_fx.vocabulary.random_state import restored_random_state
from embrace_fx.vocabulary.row_wise import RowWiseAdagrad
from embrace_fx.vocabulary.schedule import AUTO

MOST_GATHERED_IDS = 2**22
"""Most ids of one table, of all ranks together, that every rank receives at set-up: 16 MiB."""

SHARED = (
    "something outside of the model, such as a view, a NumPy array or `.data`, shares the table's memory and would not "
    "see the updates of a shard. To shard the table, delete that object, or create the table from a clone"
)


def plan_on_links(
    context: Context,
    findings: Findings | None,
    current: Plan | None,
    *,
    known: Cluster | None = None,
    roughly: bool = False,
    other_bytes: int = 0,
) -> Plan:
    """Decides the plan on rank 0, for the given or measured links, and returns it on all ranks. Collective.

    Args:
        findings: the planner's input on rank 0, or None on other ranks.
        current: the current plan, or None.
        known: the measured links, or None if they have not been measured.
        roughly: whether a short measurement of the links is enough.
        other_bytes: bytes that a step sends for parameters that are not among the findings.
    """
    communicator = context.communicator

    def decide_for(links: Cluster, links_are: LinksAre) -> Plan | str | None:
        """Decides the plan for these links on rank 0. Returns the plan, or the text of the error if that fails. Returns
        None on other ranks.

        Args:
            links: the links between ranks.
            links_are: the origin of the links: "assumed", "given" or "probed".
        """
        try:
            return None if findings is None else decide(findings, links, current, links_are)
        except Exception as error:
            return str(error) if isinstance(error, ValueError) else failure_text(error)

    given = context.options.cluster
    known = known or (current.links if current is not None and current.links_are == "probed" else None)
    if given is not None or known is not None:
        plan = decide_for(given, "given") if given is not None else decide_for(known or Cluster(), "probed")
    else:
        plan = decide_for(Cluster(), "assumed")
        # With zero bytes, the links are not probed.
        sent_bytes = plan.sent_bytes_per_step + other_bytes if isinstance(plan, Plan) else 0
        with stage("probing links", communicator.rank):
            links_of = estimate_links if roughly else measure_links
            probed = links_of(communicator, communicator.gather(sent_bytes, int)[0], context.device)
        plan = plan if probed is None else decide_for(probed, "probed")
    plan = communicator.gather(plan, Plan | str | None)[0]
    if not isinstance(plan, Plan):
        raise ValueError(plan)
    return plan


def reuse_plan(context: Context, graph: TrainingGraph, plan: Plan) -> Plan:
    """Checks that a plan that the user has passed fits the model, and returns the plan with the schedule that the
    options request. Collective.

    Raises:
        ValueError: the plan does not fit the model of some rank; raised on every rank.
    """
    own = next(_disagreements(context, graph, plan), None)
    for found in context.communicator.reports(own).values():
        raise ValueError(
            f"plan=: the plan was made for another model, optimizer or number of ranks: {found}. Pass a plan that was "
            "saved for the same model, optimizer and number of ranks, or leave out plan=."
        )
    asked = context.options.schedule
    return plan if asked in (AUTO, plan.schedule_name) else replace(plan, schedule_name=asked, chosen_because="")


def _disagreements(context: Context, graph: TrainingGraph, plan: Plan) -> Iterator[str]:
    """Yields an error text for each mismatch between a plan and the model, the optimizers or the number of ranks."""
    if plan.world_size != context.communicator.world_size:
        yield f"the plan is for {plan.world_size} ranks, but {context.communicator.world_size} are running"
    used = used_parameters(graph)
    known_optimizers, row_updates = context.optimizer_hooks.known_optimizers, context.options.row_updates
    facts = collect_facts(context.model, graph, known_optimizers, row_updates, used, {})
    planned, tables = {d.parameter: d for d in plan}, {table.parameter: table for table in graph.tables}
    if missing := planned.keys() ^ {fact.name for fact in facts}:
        yield f"these parameters are in only one of plan and model: {', '.join(sorted(missing)[:3])}"
        return
    asked = context.options.rows
    for strategy in ("alltoall", "allreduce"):
        found = {d.travels_as for d in plan if d.strategy == strategy and d.sent_bytes_per_step}
        if found and (asked not in found or found - {asked, "exact"}):
            yield f"the plan sends {strategy} as {', '.join(sorted(found))}, but compile() has rows={asked!r}"
    for fact in facts:
        decision = planned[fact.name]
        if tuple(decision.shape) != fact.shape:
            yield f"{fact.name} has shape {tuple(decision.shape)} in the plan, but {fact.shape} in the model"
        if (decision.strategy == "frozen") == fact.trainable:
            yield f"{fact.name} is frozen in only one of plan and model"
        if fact.trainable and fact.used and decision.strategy == "unused":
            yield f"{fact.name} is unused in the plan, but gets a gradient from this batch"
        if decision.strategy not in SHARDED:
            continue
        if decision.strategy == "vocabulary":
            blocker = head_sharding_blocker(graph, fact.name)
        else:
            blocker = shard_blocker(tables[fact.name]) if fact.name in tables else "no lookup reads it"
        if blocker or fact.row_update_blocker:
            yield f"the plan shards {fact.name}, which is not possible: {blocker or fact.row_update_blocker}"


def gather_findings(
    context: Context, graph: TrainingGraph, leaves: Sequence[Any], used: Collection[str], schedule: str = ""
) -> Findings | None:
    """Gathers the planner's input on rank 0: the rows that each rank's batch reads, and facts about parameters. Returns
    None on other ranks. Collective.

    Args:
        leaves: this rank's batch, as flattened arguments of the model.
        used: names of parameters that got a gradient from earlier batches.
        schedule: the schedule to plan for; "" means the one that the options request.

    Raises:
        PeerFailure: a rank's batch is bad; raised on every rank.
    """
    communicator, state, options = context.communicator, context.state, context.options
    try:
        reads = count_reads(state, graph, leaves, communicator.rank, communicator.world_size)
        own = RankFacts(
            tuple(sorted(used_parameters(graph))),
            _why_whole(state, graph),
            reads,
            count_scored(state, graph, leaves),
        )
    except Exception as error:  # the batch may be bad on this rank alone, so report any error
        own = RankFacts(failure=failure_text(error))
    everyone = communicator.gather(own, RankFacts)
    if failures := {rank: report.failure for rank, report in enumerate(everyone) if report.failure is not None}:
        raise PeerFailure(failures)
    if communicator.rank:
        return None
    sharded = {name: table.shape for name, table in state.tables.items()}
    used = {*used}.union(*(report.used for report in everyone))
    blocked = {name: reason for report in everyone for name, reason in report.whole.items()}
    known_optimizers = context.optimizer_hooks.known_optimizers
    facts = tuple(
        replace(f, local=f.name in state.ignored, row_update_blocker=blocked.get(f.name, f.row_update_blocker))
        for f in collect_facts(context.model, graph, known_optimizers, options.row_updates, used, sharded)
    )
    options = replace(options, schedule=schedule or options.schedule)
    return make_findings(graph, facts, everyone, communicator.world_size, options)


def _why_whole(state: ModelState, graph: TrainingGraph) -> dict[str, str]:
    """Maps the name of each table that this rank cannot shard to the reason."""
    whole = dict.fromkeys((*unshardable_tables(graph), *state.hooked), WHOLE)
    for table in graph.tables:
        weight = state.parameter(table.parameter)
        if not isinstance(weight, TableShard) and (memory_is_shared([weight]) or is_held_by_torch(weight)):
            whole[table.parameter] = SHARED
    return dict(sorted(whole.items()))


def make_findings(
    graph: TrainingGraph, facts: tuple[ParameterFacts, ...], reports: Sequence[RankFacts], ranks: int, options: Options
) -> Findings:
    """Returns the planner's input, made from facts, options, and the ranks' reports of the rows that they read.

    Args:
        facts: the facts about each parameter, from `collect_facts`.
        reports: what each rank's batch reads, in rank order. If there are fewer than `ranks` reports, the other ranks
            are assumed to read the mean number of rows, with unknown ids.
        ranks: the number of ranks to plan for.
        options: the options of `compile`.
    """
    rows, local_rows, sparsity = {}, {}, {}
    for table in graph.tables:
        reads = [report.reads.get(table.parameter) for report in reports]
        counts = [0 if read is None else read.rows for read in reads]
        rows[table.parameter] = (*counts, *[round(sum(counts) / len(counts))] * (ranks - len(counts)))
        known = [read for read in reads if read is not None]
        if len(known) == ranks:
            local_rows[table.parameter] = {
                each: tuple(read.local_rows[each] for read in known) for each in grid_rows(ranks)
            }
            if (found := _sparsity(table, known)) is not None:
                sparsity[table.parameter] = found
    scored = [report.scored for report in reports]
    return Findings(
        graph,
        facts,
        rows,
        ranks,
        options.strategy,
        options.schedule,
        sparsity,
        local_rows,
        options.rows,
        options.memory_budget is not None,
        {name: tuple(own[name] for own in scored) for name in scored[0] if all(name in own for own in scored)},
    )


def collect_facts(
    model: nn.Module,
    graph: TrainingGraph,
    known_optimizers: KnownOptimizers,
    row_updates: RowUpdatesOption,
    used: Collection[str],
    sharded: Mapping[str, torch.Size],
) -> tuple[ParameterFacts, ...]:
    """Returns the facts about every parameter of a model that the planner needs.

    Args:
        graph: the captured graph, in which tables have been found.
        known_optimizers: the optimizers known so far.
        row_updates: the option `row_updates` of `compile`.
        used: names of the parameters that get a gradient.
        sharded: maps the name of each table that is already sharded to the shape of the whole table.
    """
    every = enumerate((type(each), group) for each in known_optimizers.optimizers for group in each.param_groups)
    held: dict[int, list[tuple[type[Optimizer], int]]] = {}  # parameter id -> (optimizer class, param group's index)
    for k, (kind, group) in every:
        for parameter in group["params"]:
            held.setdefault(id(parameter), []).append((kind, k))
    names, tables = dict[int, list[str]](), {table.parameter for table in graph.tables}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(
        ParameterFacts(
            name,
            tuple(sharded.get(name, parameter.shape)),
            parameter.element_size(),
            parameter.requires_grad,
            name in used,
            next(filter(None, (whole_table_reason(kind) for kind, _ in of)), None),
            of[-1][1] if of else -1,
            _update_of_unread_rows(known_optimizers, parameter, row_updates) if name in tables else "",
            adds_up_norms=any(kind is RowWiseAdagrad for kind, _ in of),
            tied=tuple(names[id(parameter)][1:]),
        )
        for name, parameter in model.named_parameters()
        for of in [held.get(id(parameter), [])]
    )


def _update_of_unread_rows(
    known_optimizers: KnownOptimizers, parameter: nn.Parameter, row_updates: RowUpdatesOption
) -> DenseUpdatePolicy:
    """Returns how a table's optimizer updates rows that no batch has read in a step, such as "sweep". A table without
    an optimizer is assumed to get one that changes all rows, such as Adam.

    Args:
        parameter: the table.
        row_updates: the option `row_updates` of `compile`.
    """
    way = known_optimizers.dense_update_policy(parameter, row_update_semantics(row_updates))
    return row_updates if way not in STILL and row_updates in ("sweep", "replay") else way


@dataclass(frozen=True)
class Read:
    """Describes which rows of one table the batch of a rank reads.

    Attributes:
        rows: the number of unique rows, including the padding row, which is always sent.
        ids: unique ids of rows that get a gradient, or None if there are too many to send.
        draws: the number of ids that get a gradient, counting duplicates.
        local_rows: maps a possible number R of grid rows to the number of unique rows that would be in this rank's row
            of the grid, if the table were sharded on a grid of ranks with R rows.
    """

    rows: int
    ids: Tensor | None
    draws: int
    local_rows: dict[int, int]


@dataclass(frozen=True)
class RankFacts:
    """The facts about its first batch that one rank reports to rank 0.

    Attributes:
        used: names of the parameters that get a gradient.
        whole: maps the name of each table that the rank cannot shard to the reason.
        reads: maps the name of a table to the rows that the batch reads.
        scored: maps the name of an output layer's table to the number of positions in the batch that have a label.
        failure: the text of the error if the batch could not be examined, or None.
    """

    used: tuple[str, ...] = ()
    whole: dict[str, str] = field(default_factory=dict)
    reads: dict[str, Read] = field(default_factory=dict)
    scored: dict[str, int] = field(default_factory=dict)
    failure: str | None = None


def _sparsity(table: TableSpec, reads_by_rank: Sequence[Read]) -> Sparsity | None:
    """Returns the measured sparsity of a table's gradients on all ranks, or None if a rank did not report its ids."""
    ids = [own.ids.to(torch.int64) for own in reads_by_rank if own.ids is not None]
    if len(ids) < len(reads_by_rank):
        return None
    # Leave out ids outside of the table. The step itself raises an error for them.
    inside = [own[(own >= 0) & (own < table.num_rows)] for own in ids]
    draws = sum(own.draws for own in reads_by_rank)
    return measure_sparsity(inside, table.num_rows, table.embedding_dim, table.dtype.itemsize, draws)


def grid_rows(ranks: int) -> list[int]:
    """Returns the divisors of `ranks` above 1. A grid of ranks can have these numbers of rows, or a single row."""
    return [each for each in range(2, ranks + 1) if ranks % each == 0]


def drawn_ids(state: ModelState, graph: TrainingGraph, leaves: Sequence[Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Finds the rows of each table that a batch reads. Tables whose ids do not depend on the batch alone are left out.

    Args:
        leaves: the batch, as flattened arguments of the model.

    Returns:
        Maps the table's name to (the ids (T,) that get a gradient, with duplicates; the unique rows (U,) that are read,
            including the padding row).
    """
    tables = [t for t in graph.tables if all(use.ids_from_batch for use in t.uses)]
    if not tables:
        return {}
    ids, found = iter(_run(state, extract_ids(graph, tables), leaves)), {}
    for table in tables:
        of_uses = [next(ids).reshape(-1) for _ in table.uses]
        drawn = [own[own != use.padding_idx] for own, use in zip(of_uses, table.uses, strict=True)]
        unique = unique_ids(of_uses, table.num_rows, table.uses[0].padding_idx)[0]
        found[table.parameter] = torch.cat(drawn).to(torch.int64), unique
    return found


def count_reads(
    state: ModelState, graph: TrainingGraph, leaves: Sequence[Any], rank: int, ranks: int
) -> dict[str, Read]:
    """Counts the rows of each table that a rank's batch reads. Tables whose ids do not depend on the batch alone are
    left out.

    Args:
        leaves: the rank's batch, as flattened arguments of the model.
        ranks: the number of ranks.

    Returns:
        Maps the table's name to the rows that the batch reads.
    """
    found = {}
    for name, (drawn, unique) in drawn_ids(state, graph, leaves).items():
        ids = drawn.unique().cpu()
        narrow = ids.to(torch.int32) if ids.numel() and int(ids.max()) < 2**31 else ids
        sent = narrow if ids.numel() <= MOST_GATHERED_IDS // ranks else None
        own_rows = {each: Grid(each, ranks // each).place(rank)[0] for each in grid_rows(ranks)}
        local_rows = {each: int((unique % each == own).sum()) for each, own in own_rows.items()}
        found[name] = Read(unique.numel(), sent, drawn.numel(), local_rows)
    return found


def count_scored(state: ModelState, graph: TrainingGraph, leaves: Sequence[Any]) -> dict[str, int]:
    """Counts the positions of a batch whose label the loss does not ignore, for each output layer with its loss in the
    model. Returns name of the layer's table -> count.

    Args:
        leaves: the batch, as flattened arguments of the model.
    """
    found = labels_in_batch(graph)
    if not found:
        return {}
    labels = _run(state, extract_values(graph, [node for node, _ in found.values()]), leaves)
    return {name: int((own != ignored).sum()) for (name, (_, ignored)), own in zip(found.items(), labels, strict=True)}


def scores_nothing(state: ModelState, graph: TrainingGraph, leaves: Sequence[Any]) -> bool:
    """Returns whether some loss of the model is nan for a batch, because it averages over labels and ignores all of
    them.

    Args:
        leaves: the batch, as flattened arguments of the model.
    """
    labels = mean_loss_labels(graph)
    if not labels:
        return False
    found = _run(state, extract_values(graph, [node for node, _ in labels]), leaves)
    return any(bool((own == ignored).all()) for own, (_, ignored) in zip(found, labels, strict=True))


def _run(state: ModelState, module: fx.GraphModule, leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Runs a graph whose only input is a batch, and returns the graph's outputs. The state of the random number
    generators does not change.

    Args:
        leaves: the batch, as flattened arguments of the model.
    """
    parameter = state.any_parameter()
    device = torch.device("cpu") if parameter is None else parameter.device
    with restored_random_state(device), torch.no_grad():
        return make_reader(module, state)(leaves)
