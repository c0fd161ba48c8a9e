"""A language model of two sharded tables, and the passes of its steps under schedule "2d"."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from embrace_fx.passes.pipeline import Pass, overlap_passes, training_passes
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Decision, Plan
from embrace_fx.vocabulary.schedule import Cuts
from tests.support.graphs import analysed

WORDS, DIM, BATCH, LENGTH, LAYERS = 500, 32, 8, 16, 12

TABLES = ("words.weight", "output.weight")


class LanguageModel(nn.Module):
    """Both lookups stand at the head of the forward; the output table is read next to the loss, or at once."""

    def __init__(self, *, read_at_once: bool = False) -> None:
        super().__init__()
        self.words, self.output = nn.Embedding(WORDS, DIM), nn.Embedding(WORDS, DIM)
        self.layers = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(LAYERS)))
        self.read_at_once = read_at_once

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        words, outputs = self.words(ids), self.output(targets)
        if self.read_at_once:
            words = words + outputs
        return (self.layers(words) * outputs).sum(-1).square().mean()


def captured(*, read_at_once: bool = False) -> TrainingGraph:
    model = LanguageModel(read_at_once=read_at_once)
    return analysed(model, *(torch.randint(WORDS, (BATCH, LENGTH)) for _ in range(2)))


def passes_of(
    tables: tuple[str, ...] = TABLES,
    shape: tuple[int, int] = (WORDS, DIM),
    buckets: Mapping[tuple[str, ...], int] | None = None,
) -> tuple[Pass, ...]:
    """The passes on rank 0 of two.

    Args:
        buckets: parameters -> elements; by default a bucket for each layer of `LanguageModel`.
    """
    if buckets is None:
        layers = reversed(range(LAYERS))
        buckets = {(f"layers.{k}.weight", f"layers.{k}.bias"): DIM * (DIM + 1) for k in layers}
    decisions = tuple(Decision(t, shape, True, "alltoall", "requested", 1000, 0, 0.0) for t in tables)
    plan = Plan(2, decisions, tuple(buckets))
    cuts = Cuts(tuple((size,) for size in buckets.values()), tuple((table, 2) for table in tables))
    return (*training_passes(plan, tables, 0), *overlap_passes(plan, "2d", 0, cuts))
