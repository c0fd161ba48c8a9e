"""Planning the first training batch, and placing parameters as the plan says."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam

from embrace_fx.agreement import failure_text
from embrace_fx.cost import Cluster
from embrace_fx.exactness import RowUpdates, row_update_blocker
from embrace_fx.graph import Gradient, Parameter, Table, TrainingGraph
from embrace_fx.options import Options
from embrace_fx.passes.asked_strategies import Strategy
from embrace_fx.passes.planner import decide
from embrace_fx.passes.pricing import ParameterFacts
from embrace_fx.passes.shard_cost import RowsAtHome
from embrace_fx.passes.tables import extract_ids
from embrace_fx.plan import Grid, LinksAre, Plan
from embrace_fx.runtime.communicator import Communicator
from embrace_fx.runtime.failure import PeerFailure
from embrace_fx.runtime.kernels import unique_ids
from embrace_fx.runtime.model_state import ModelState
from embrace_fx.runtime.optimizers import DenseTable, Stepping
from embrace_fx.runtime.phases import reader
from embrace_fx.runtime.placement import broadcast_state, materialise, shard_parameter, unshard_parameter
from embrace_fx.runtime.probe import probed_links
from embrace_fx.runtime.tables import RowTable
from embrace_fx.sparsity import Sparsity, measure, with_units

MOST_GATHERED_IDS = 2**22
"""Ids of one table, of all ranks together, that every rank may receive at set-up: 16 MiB."""


@dataclass(frozen=True)
class Setting:
    """What a plan is made for and applied to.

    Attributes:
        classes: id of an optimizer -> the class that defines its update.
        stepping: id of an optimizer -> what its step does beyond that class.
    """

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    classes: Mapping[int, type[Optimizer]]
    stepping: Mapping[int, Stepping]
    state: ModelState
    communicator: Communicator
    options: Options


@dataclass(frozen=True)
class Findings:
    """What a plan is decided on: rank 0's, of what every rank reported.

    Attributes:
        rows: table -> unique rows that each rank reads.
        sparsity: table -> how its gradients lie on all ranks, where all of them told their ids.
        rows_at_home: table -> which of each rank's rows its own row of a grid has, of `rows` as they were measured.
    """

    graph: TrainingGraph
    facts: tuple[ParameterFacts, ...]
    rows: Mapping[str, tuple[int, ...]]
    sparsity: Mapping[str, Sparsity]
    world_size: int
    strategy: Strategy
    schedule: str
    rows_at_home: Mapping[str, RowsAtHome] = field(default_factory=dict)

    def plan(self, links: Cluster, links_are: LinksAre, current: Plan | None) -> Plan:
        """The plan for these links; `current`: the one in use, if any."""
        planned = decide(
            self.graph,
            self.facts,
            self.rows,
            world_size=self.world_size,
            strategy=self.strategy,
            cluster=links,
            sparsity=self.sparsity,
            rows_at_home=self.rows_at_home,
            current=current,
            schedule=self.schedule,
        )
        return replace(planned, links_are=links_are)

    def with_rows(self, rows: Mapping[str, tuple[int, ...]]) -> Findings:
        """The same with other numbers of rows, of some tables."""
        lying = {
            name: with_units(found, rows[name]) if name in rows else found for name, found in self.sparsity.items()
        }
        at_home = {name: found for name, found in self.rows_at_home.items() if name not in rows}
        return replace(self, rows={**self.rows, **rows}, sparsity=lying, rows_at_home=at_home)


def make_plan(setting: Setting, graph: TrainingGraph, leaves: Sequence[Any]) -> tuple[Plan, Findings | None]:
    """The plan for a training batch: measured on every rank, decided on rank 0, the same everywhere.

    Returns: the plan, and on rank 0 what it was decided on.

    Raises:
        PeerFailure: a rank's batch is bad, on every rank.
        ValueError: the strategy asked for does not fit the model, on every rank.
    """
    findings = find(setting, graph, leaves, frozenset())
    return plan_on_links(setting, findings, None), findings


def plan_on_links(setting: Setting, findings: Findings | None, current: Plan | None) -> Plan:
    """Rank 0's plan for the links given, or probed where a step sends enough for it to matter. Collective.

    Args:
        findings: rank 0's alone.
        current: the plan in use, if any.

    Raises:
        ValueError: the strategy asked for does not fit the model, on every rank.
    """
    if setting.options.cluster is not None:
        return _agree_on_plan(setting, findings, (setting.options.cluster, "given"), current)
    if current is not None and current.links_are == "probed":
        return _agree_on_plan(setting, findings, (current.links, "probed"), current)
    plan = _agree_on_plan(setting, findings, (Cluster(), "assumed"), current)
    probed = _probed(setting, plan)
    return plan if probed is None else _agree_on_plan(setting, findings, (probed, "probed"), current)


def find(setting: Setting, graph: TrainingGraph, leaves: Sequence[Any], used: Collection[str]) -> Findings | None:
    """What a batch is on all ranks, for rank 0. Collective.

    Args:
        used: parameters that earlier batches gave a gradient.

    Raises:
        PeerFailure: a rank's batch is bad, on every rank.
    """
    own: dict[str, Any] = {"used": used_parameters(graph), "tables": [t.parameter for t in graph.tables]}
    try:
        own["reads"] = _measure_reads(setting, graph, leaves)
    except Exception as error:  # the batch may be bad, on this rank alone
        own["failure"] = failure_text(error)
    everyone = setting.communicator.gather_objects(own)
    if failures := {rank: report["failure"] for rank, report in enumerate(everyone) if "failure" in report}:
        raise PeerFailure(failures)
    return _findings(setting, graph, everyone, used) if setting.communicator.rank == 0 else None


def _probed(setting: Setting, plan: Plan) -> Cluster | None:
    """The links between the ranks, where a step sends enough to be cut. Collective."""
    devices = {parameter.device for parameter in setting.model.parameters() if parameter.device.type != "meta"}
    device = devices.pop() if len(devices) == 1 else torch.get_default_device()
    return probed_links(setting.communicator, plan.sent_bytes_per_step, device)


def _agree_on_plan(
    setting: Setting, findings: Findings | None, links: tuple[Cluster, LinksAre], current: Plan | None
) -> Plan:
    """Rank 0's plan, on every rank."""
    plan: Plan | str | None = None
    if findings is not None:
        try:
            plan = findings.plan(*links, current)
        except Exception as error:  # whatever it is, the other ranks wait for it
            plan = str(error) if isinstance(error, ValueError) else failure_text(error)
    plan = setting.communicator.gather_objects(plan)[0]
    if isinstance(plan, str):
        raise ValueError(plan)
    assert plan is not None
    return plan


def _findings(
    setting: Setting, graph: TrainingGraph, everyone: list[dict[str, Any]], used: Collection[str]
) -> Findings:
    """What follows from everything that the ranks reported."""
    used = set(used).union(*(report["used"] for report in everyone))
    reads = [report["reads"] for report in everyone]
    rows = {name: tuple(own[name].rows if name in own else 0 for own in reads) for name in everyone[0]["tables"]}
    facts = facts_of(setting.model, setting.optimizers, setting.classes, setting.options.row_updates, used)
    sparsity = {
        table.parameter: found
        for table in graph.tables
        if (found := _sparsity(table, [own.get(table.parameter) for own in reads])) is not None
    }
    ranks = setting.communicator.world_size
    at_home = {
        name: {each: tuple(own[name].at_home[each] for own in reads) for each in grid_rows(ranks)}
        for name in everyone[0]["tables"]
        if all(name in own for own in reads)
    }
    options = setting.options
    return Findings(graph, facts, rows, sparsity, ranks, options.strategy, options.schedule, at_home)


def facts_of(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    classes: Mapping[int, type[Optimizer]],
    row_updates: RowUpdates,
    used: Collection[str],
) -> tuple[ParameterFacts, ...]:
    """What the planner needs to know of every parameter.

    Args:
        classes: id of an optimizer -> the class that defines its update.
        used: parameters to which a forward gives a gradient.
    """
    every = enumerate(group for optimizer in optimizers for group in optimizer.param_groups)
    groups = {id(parameter): k for k, group in every for parameter in group["params"]}
    return tuple(
        ParameterFacts(
            name,
            tuple(parameter.shape),
            parameter.element_size(),
            parameter.requires_grad,
            name in used,
            *_row_updates(optimizers, classes, row_updates, parameter),
            groups.get(id(parameter), -1),
        )
        for name, parameter in model.named_parameters()
    )


def _row_updates(
    optimizers: Sequence[Optimizer],
    classes: Mapping[int, type[Optimizer]],
    row_updates: RowUpdates,
    parameter: nn.Parameter,
) -> tuple[str | None, bool]:
    """Why a table cannot be updated by rows, or None; whether it must be, whatever its size."""
    if not optimizers:
        return "no optimizer was given: whole gradients are left in .grad", False
    holders = [
        (optimizer, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        if any(p is parameter for p in group["params"])
    ]
    if not holders:
        return "no optimizer given holds it", False
    if len(holders) > 1:
        return f"{len(holders)} optimizers hold it, and rows are updated by one", False
    optimizer, group = holders[0]
    kind = classes[id(optimizer)]
    blocker = row_update_blocker(optimizer, group, row_updates, kind=kind)
    return blocker, kind is SparseAdam or (row_updates == "lazy" and blocker is None)


@dataclass(frozen=True)
class Read:
    """What one batch reads of one table.

    Attributes:
        rows: unique rows, the padding row included: it travels between shards whether or not the batch holds it.
        drawn: (T,) ids as often as the batch has them, without those that get no gradient.
        unique: (rows,) those rows.
    """

    rows: int
    drawn: Tensor
    unique: Tensor

    def at_home(self, rank: int, ranks: int) -> dict[int, int]:
        """How many of its rows a rank's own row of a grid has, by the grid's rows."""
        sizes = {each: Grid(each, ranks // each) for each in grid_rows(ranks)}
        return {each: int((self.unique % each == grid.place(rank)[0]).sum()) for each, grid in sizes.items()}


def grid_rows(ranks: int) -> list[int]:
    """How many rows a grid of so many ranks can have, beyond one."""
    return [each for each in range(2, ranks + 1) if ranks % each == 0]


def used_parameters(graph: TrainingGraph) -> set[str]:
    """Parameters to which the graph gives a gradient."""
    return {r.of.name for _, r in graph.outputs() if isinstance(r, Gradient) and isinstance(r.of, Parameter)}


def reads_of(state: ModelState, graph: TrainingGraph, leaves: Sequence[Any]) -> dict[str, Read]:
    """What a batch reads, by table: the extracted id function, run on the batch itself."""
    tables = [t for t in graph.tables if all(use.ids_from_batch for use in t.uses)]
    if not tables:
        return {}
    run = reader(extract_ids(graph, tables), state)
    with torch.random.fork_rng(), torch.no_grad():  # a model that draws ids must draw the same ones afterwards
        ids = iter(run(leaves))
    reads = {}
    for table in tables:
        of_uses = [next(ids) for _ in table.uses]
        unique = unique_ids(of_uses, table.num_rows, table.uses[0].padding_idx)[0]
        drawn = [
            own[own != use.padding_idx] for own, use in zip((i.reshape(-1) for i in of_uses), table.uses, strict=True)
        ]
        reads[table.parameter] = Read(unique.numel(), torch.cat(drawn).to(torch.int64), unique)
    return reads


@dataclass(frozen=True)
class _Reported:
    """What one rank tells of a table: unique rows, those with a gradient unless they are too many, the ids that these
    were found in, and how many rows a grid would have at home."""

    rows: int
    ids: Tensor | None
    draws: int
    at_home: Mapping[int, int]


def _measure_reads(setting: Setting, graph: TrainingGraph, leaves: Sequence[Any]) -> dict[str, _Reported]:
    rank, ranks = setting.communicator.rank, setting.communicator.world_size
    limit = MOST_GATHERED_IDS // ranks
    reported = {}
    for name, read in reads_of(setting.state, graph, leaves).items():
        ids = read.drawn.unique().cpu()
        told = _narrow(ids) if ids.numel() <= limit else None
        reported[name] = _Reported(read.rows, told, read.drawn.numel(), read.at_home(rank, ranks))
    return reported


def _narrow(ids: Tensor) -> Tensor:
    return ids.to(torch.int32) if ids.numel() and int(ids.max()) < 2**31 else ids


def _sparsity(table: Table, reported: Sequence[_Reported | None]) -> Sparsity | None:
    """How a table's gradients lie on all ranks, where all of them told their ids."""
    told = [own for own in reported if own is not None]
    ids = [own.ids.to(torch.int64) for own in told if own.ids is not None]
    if len(ids) < len(reported):
        return None
    inside = [own[(own >= 0) & (own < table.num_rows)] for own in ids]  # the step itself reports the others
    draws = sum(own.draws for own in told)
    return measure(inside, table.num_rows, table.embedding_dim, table.dtype.itemsize, draws)


def place(setting: Setting, graph: TrainingGraph, plan: Plan) -> None:
    """Shards the tables, makes the replicas equal, and hands the tables to their optimizers."""
    grids = {name: plan[name].grid for name in plan.sharded}
    materialise(setting.model, grids, setting.optimizers, setting.communicator)
    for name in plan.sharded:
        _shard(setting, name, plan)
    if setting.communicator.world_size > 1:
        broadcast_state(setting.model, frozenset(plan.sharded), setting.communicator)
    _hand_over(setting, graph, plan)


def place_anew(setting: Setting, graph: TrainingGraph, old: Plan, new: Plan) -> None:
    """Places tables as another plan says, between two steps; state and gradients of theirs come along. Collective.

    A gradient of a replica is the mean already, the same on all ranks; of a shard each rank has its own part.
    """
    group, state = setting.communicator.group, setting.state
    with setting.communicator.watching(), torch.no_grad():
        for name in old.sharded:
            if name not in new.sharded:
                table = state.tables.pop(name)
                gradient = table.dense_gradient(group)
                table.parameter.grad = None
                unshard_parameter(setting.model, name, setting.optimizers, group).grad = gradient
        for name in new.sharded:
            if name not in old.sharded:
                gradient = state.parameter(name).grad
                state.parameter(name).grad = None
                _shard(setting, name, new)
                if gradient is not None:
                    state.tables[name].add_dense_gradient(gradient)
    ordered = {name: state.tables[name] for name in new.sharded}
    state.tables.clear()
    state.tables.update(ordered)
    _hand_over(setting, graph, new)


def _shard(setting: Setting, name: str, plan: Plan) -> None:
    parameter = shard_parameter(setting.model, name, setting.optimizers, setting.communicator, plan[name].grid)
    setting.state.tables[name] = _row_table(setting, name, parameter)


def _hand_over(setting: Setting, graph: TrainingGraph, plan: Plan) -> None:
    """Tells optimizers and announcements which tables there are."""
    for stepping in setting.stepping.values():
        stepping.sharded, stepping.dense_tables = [], []
    for table in setting.state.tables.values():
        setting.stepping[id(table.optimizer)].sharded.append(table)
    for found in graph.tables:
        parameter = setting.state.parameter(found.parameter)
        if found.parameter not in plan.sharded and _updated_by_rows(setting, parameter):
            table = _row_table(setting, found.parameter, parameter)
            dense = DenseTable(table, all_rows=found.use != "sparse")
            setting.stepping[id(table.optimizer)].dense_tables.append(dense)
    exchanged = (*plan.sharded, *plan.renormed)
    setting.communicator.tables = len(exchanged)
    setting.communicator.watched = tuple(name for name in plan.watched if name not in exchanged)


def _updated_by_rows(setting: Setting, parameter: nn.Parameter) -> bool:
    return _row_updates(setting.optimizers, setting.classes, setting.options.row_updates, parameter)[1]


def _row_table(setting: Setting, name: str, parameter: nn.Parameter) -> RowTable:
    for optimizer in setting.optimizers:
        if any(p is parameter for group in optimizer.param_groups for p in group["params"]):
            kind = setting.classes[id(optimizer)]
            return RowTable(name, parameter, optimizer, kind, setting.options.row_updates)
    raise AssertionError(f"{name} is updated by rows, but no optimizer holds it")
