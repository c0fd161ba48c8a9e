"""A translator of two tables and three blocks, its graph and its step under a schedule."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from embrace_fx.cost import links as cost
from embrace_fx.passes.pipeline import overlap_passes, run_passes, training_passes
from embrace_fx.passes.scheduler.step_graph import Sizes, build_step_graph
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.plan import Decision, Plan
from embrace_fx.vocabulary.schedule import Cuts, StepGraph
from tests.support.graphs import analysed

WORDS, DIM, BATCH, LENGTH = 2000, 128, 16, 32

TABLES = ("source.weight", "target.weight")

CHUNK = (DIM + 1) * DIM // 2

CUTS = Cuts(((CHUNK, CHUNK),) * 3, tuple((table, 2) for table in TABLES))


class Translator(nn.Module):
    """Two tables and three blocks, the second table read between the last two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(WORDS, DIM)
        self.target = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = self.blocks[0](self.source(source)).relu()
        x = self.blocks[1](x).relu()
        scores: Tensor = self.blocks[2](x * self.target(target))
        return scores.square().mean()


@functools.cache
def captured() -> TrainingGraph:
    ids = torch.randint(WORDS, (BATCH, LENGTH))
    return analysed(Translator(), ids, ids + 0)


@functools.cache
def translator(name: str) -> tuple[TrainingGraph, Plan]:
    """Its graph under a schedule, as one of four ranks has it, each block a bucket of two chunks."""
    sent = 2 * BATCH * LENGTH * DIM * 4 * 3 // 4
    decisions = tuple(Decision(t, (WORDS, DIM), True, "alltoall", "requested", sent, 0, 0.0) for t in TABLES)
    plan = Plan(4, decisions, tuple((f"blocks.{k}.weight", f"blocks.{k}.bias") for k in (2, 1, 0)))
    passes = (*training_passes(plan, TABLES, 0), *overlap_passes(plan, name, 0, CUTS))
    return run_passes(captured(), passes).graph, plan


def steps_of_translator(name: str, sent: dict[OperationId, int] | None = None) -> StepGraph:
    graph, plan = translator(name)
    row_bytes = {table: plan[table].sent_bytes_per_step // 2 for table in plan.sharded}
    sizes = Sizes(sent or {}, row_bytes, BATCH * LENGTH * 4 * (plan.world_size - 1))
    return build_step_graph(graph, sizes, None, cost.Cluster(), plan.world_size)
