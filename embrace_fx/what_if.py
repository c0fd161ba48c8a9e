"""Implements `embrace_fx.plan`: predicts a model's plan and schedule on any cluster and any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.capture import capture
from embrace_fx.capture.arguments import flatten_arguments
from embrace_fx.capture.meta_models import is_on_meta, on_fake_cpu
from embrace_fx.compiled_model import CompiledModel
from embrace_fx.cost.devices import NVME
from embrace_fx.cost.links import Cluster
from embrace_fx.cost.sparsity import Sparsity, extrapolate
from embrace_fx.cost.storage import StorageTier
from embrace_fx.cost.wire import Format
from embrace_fx.passes.pipeline import overlap_passes, run_passes, training_passes, with_tables
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.grouping import cut_communication
from embrace_fx.passes.planner.plan_fit import used_parameters
from embrace_fx.passes.scheduler.schedule_facts import compute_facts
from embrace_fx.planning.findings import (
    RankFacts,
    collect_facts,
    count_reads,
    count_scored,
    drawn_ids,
    make_findings,
)
from embrace_fx.planning.scheduling import decide_order, predict_storage_reads
from embrace_fx.planning.tiering import add_working_sets
from embrace_fx.runtime.ranks.communicator import SingleProcess
from embrace_fx.runtime.ranks.step_handshake import StepHandshake
from embrace_fx.runtime.step.optimizer_hooks import OptimizerHooks
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.setup.context import Context
from embrace_fx.setup.options import Optimizers, Options
from embrace_fx.viz import DrawnSchedule
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.plan_text import readable_bytes
from embrace_fx.vocabulary.random_state import restored_random_state
from embrace_fx.vocabulary.schedule import ScheduleOption

T = TypeVar("T")

LOADER_AHEAD = 3
"""Assumed number of batches read ahead if tables are larger than memory."""


class Forecast(Plan):
    """The plan that `embrace_fx.plan` predicts for a cluster, with the schedule that follows from it."""

    _context: Context
    _graph: TrainingGraph

    @classmethod
    def predict(cls, planned: Plan, context: Context, graph: TrainingGraph) -> Forecast:
        """Returns a plan as a forecast, which can also predict the plan's schedule.

        Args:
            planned: the plan.
            context: the model, its optimizers and the options.
            graph: the captured graph.
        """
        found = cls(**vars(planned))
        vars(found).update(_context=context, _graph=graph)
        return found

    def save(self, path: str | Path) -> None:
        """Saves the plan to a file, for `compile(plan=path)`."""
        Plan(**{field.name: getattr(self, field.name) for field in fields(Plan)}).save(path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and all(
            getattr(self, field.name) == getattr(other, field.name) for field in fields(Plan)
        )

    def __hash__(self) -> int:
        return super().__hash__()

    def explain(self) -> str:
        """Returns a text with all strategies that were compared, and the predicted storage reads of tables larger than
        memory.
        """
        step_ms = self.schedule.without_storage_ms if self.memory else None
        lines = (
            f"{name}, {readable_bytes(of.nbytes)} of memory: {of.describe(step_ms)}" for name, of in self.memory.items()
        )
        return super().explain() + "".join(f"{each}\n" for each in lines)

    @cached_property
    def schedule(self) -> DrawnSchedule:
        """The predicted schedule: the launch order, and the timeline of rank 0. Its method `save` draws the schedule to
        a file.
        """
        tables = {table.parameter for table in self._graph.tables}
        compiled = run_passes(self._graph, training_passes(self, tables, 0))
        found = cut_communication(self, self._context.state.parameter)
        passes = overlap_passes(self, self.schedule_name, 0, found)
        compiled = run_passes(self._graph, passes, compiled)
        beyond = predict_storage_reads(self, LOADER_AHEAD)
        schedule, _ = decide_order(self._context, self, compiled.graph, beyond)
        return DrawnSchedule.from_schedule(schedule, lambda: compute_facts(self, schedule))


class _SingleCommunicator(SingleProcess):
    """A communicator for planning in one process. The process acts as rank 0, and other ranks are assumed to be equal
    to it.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__(None)
        self.world_size = world_size

    def gather(self, value: T, kind: Any) -> list[T]:
        """Returns a list with this process's value for every rank. Ignores `kind`, the type of the value."""
        return [value] * self.world_size


def plan(  # noqa: PLR0913
    model: nn.Module,
    batch: Any,
    *,
    world_size: int | None = None,
    cluster: Cluster = Cluster(),
    optimizer: Optimizers = None,
    strategy: Strategy = "auto",
    schedule: ScheduleOption = "auto",
    row_updates: RowUpdatesOption = "exact",
    rows: Format = "exact",
    table_memory: float | Mapping[str, float] | None = None,
    storage: tuple[StorageTier, ...] = (NVME,),
) -> Forecast:
    """Returns the plan that `compile` would make on `world_size` ranks of a cluster. Needs only one process and no
    network.

    The model is captured as in its first training call. Neither the model nor the optimizer is changed.
    `plan(...).explain()` returns the predicted cost of every strategy, and `plan(...).schedule.save("schedule.html")`
    draws the predicted schedule.

    Args:
        model: a plain module, in training mode. On the meta device it needs no memory.
        batch: the batch of one rank, or a list with one batch for each rank. A batch is a tensor, a tuple of positional
            arguments, or a mapping of keyword arguments. If there are fewer batches than ranks, the other ranks are
            assumed to draw ids independently, as often as the given batches contain them
            (`embrace_fx.cost.sparsity.extrapolate`).
        world_size: the number of ranks. None: one rank for each batch.
        cluster: the links between ranks.
        optimizer: as for `compile`.
        strategy: as for `compile`.
        schedule: as for `compile`.
        row_updates: as for `compile`.
        rows: as for `compile`.
        table_memory: as for `compile`: a limit on the device's memory.
        storage: the storage tiers for rows that exceed `table_memory`, fastest first (`embrace_fx.cost.devices`).

    Raises:
        CaptureError: the forward cannot be captured.
        ValueError: an option is unknown, the model is compiled, there is no batch, or there are more batches than
            ranks.
    """
    options = Options(strategy=strategy, schedule=schedule, row_updates=row_updates, cluster=cluster, rows=rows)
    if table_memory is not None:
        options = replace(options, table_memory=table_memory, spill_to="nowhere")
    options.check("plan()")
    if isinstance(model, CompiledModel) or any(isinstance(parameter, TableShard) for parameter in model.parameters()):
        raise ValueError("plan(): the model is compiled already. Read model.plan, or pass the plain model.")
    batches, ranks = _batches_of_ranks(batch, world_size)
    optimizers = (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer or ())
    state, communicator = ModelState(model), _SingleCommunicator(ranks)
    announcements = StepHandshake(communicator)
    # The callback that makes tables whole is never called, because no step runs.
    optimizer_hooks = OptimizerHooks(state, announcements, lambda names, reason: None)
    for each in optimizers:
        optimizer_hooks.known_optimizers.add(each)
    captured = [_capture_batch(model, state, each) for each in batches]
    reports = [
        RankFacts(
            tuple(used_parameters(graph)),
            {},
            count_reads(state, graph, leaves, rank, ranks),
            count_scored(state, graph, leaves),
        )
        for rank, (graph, leaves) in enumerate(captured)
    ]
    graph = captured[0][0]
    used = frozenset[str]().union(*(report.used for report in reports))
    facts = collect_facts(model, graph, optimizer_hooks.known_optimizers, row_updates, used, {})
    findings = make_findings(graph, facts, reports, ranks, options)
    if len(batches) < ranks:
        drawn = [drawn_ids(state, *each) for each in captured]
        findings = replace(findings, sparsity=_extrapolate_sparsity(graph, drawn, ranks))
    planned = decide(findings, cluster, links_are="assumed" if cluster == Cluster() else "given")
    context = Context(model, optimizer_hooks, state, announcements, options)
    return Forecast.predict(add_working_sets(context, planned, findings.sparsity, storage), context, graph)


def _batches_of_ranks(batch: Any, world_size: int | None) -> tuple[list[Any], int]:
    """Returns the given batches as a list, and the number of ranks (`world_size`, or one per batch).

    Raises:
        ValueError: there is no batch, or there are more batches than ranks.
    """
    batches = list(batch) if isinstance(batch, list) else [batch]
    ranks = len(batches) if world_size is None else world_size
    if not 1 <= len(batches) <= ranks:
        raise ValueError(
            f"plan(): {len(batches)} batch(es) do not fit world_size={ranks}. Pass at least one batch, and at most one "
            "per rank. A list means one batch per rank: to pass the arguments of one batch, use tuple(batch)."
        )
    return batches, ranks


def _capture_batch(model: nn.Module, state: ModelState, batch: Any) -> tuple[TrainingGraph, list[Any]]:
    """Captures a model's graph with one batch. Returns the graph and the flattened batch.

    Args:
        state: the model's parameters and tables.
        batch: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
    """
    args, kwargs = _split_arguments(batch)
    parameter = state.any_parameter()
    with restored_random_state(torch.device("cpu") if parameter is None else parameter.device):
        if is_on_meta(model):
            with on_fake_cpu(model, (args, kwargs)) as (twin, (fake_args, fake_kwargs)):
                graph = with_tables(capture(twin, fake_args, fake_kwargs, train=True).graph)
        else:
            graph = with_tables(capture(model, args, kwargs, train=True).graph)
    return graph, flatten_arguments(args, kwargs)[0]


def _split_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Splits a batch into positional and keyword arguments of the model."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def _extrapolate_sparsity(
    graph: TrainingGraph, by_batch: Sequence[Mapping[str, tuple[Tensor, Tensor]]], ranks: int
) -> dict[str, Sparsity]:
    """Extrapolates each table's sparsity from a few batches to `ranks` ranks. Returns the sparsity by the table's name,
    for tables whose ids are known in all batches.

    Args:
        by_batch: for each batch, maps a table's name to (ids that get a gradient, with duplicates; unique rows).
    """
    found = {}
    for table in graph.tables:
        drawn = [each[table.parameter][0].cpu() for each in by_batch if table.parameter in each]
        if len(drawn) == len(by_batch):
            shape = table.num_rows, table.embedding_dim, table.dtype.itemsize
            found[table.parameter] = extrapolate(drawn, *shape, world_size=ranks)
    return found
