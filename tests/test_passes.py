"""Every pass: golden text, the values it keeps, illegal twins, and nothing changed where nothing matches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from embrace_fx.compiler import Pass
from embrace_fx.graph import TrainingGraph
from embrace_fx.passes.dropout import EagerDropout
from embrace_fx.passes.narrow import NarrowExchange
from embrace_fx.passes.partition import Partition
from embrace_fx.passes.planner import shard_blocker
from embrace_fx.passes.reduce import ReduceGradients
from embrace_fx.passes.replicas import GlobalFrequency
from embrace_fx.passes.shard import ShardTables
from embrace_fx.passes.tables import FindTables
from tests.golden import check_golden
from tests.graphs import analysed, apply, assert_equal_outputs, run_graph, table_of, text

IDS = torch.tensor([[3, 1, 3], [0, 5, 1]])


class Plain(nn.Module):
    """One table with padding, one dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, padding_idx=0)
        self.dense = nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.dense(self.table(ids)).square().sum()
        return loss


class Dropped(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.dense(nn.functional.dropout(self.table(ids), 0.5)).square().sum()
        return loss


class Cast(Plain):
    """As under autocast: the rows are used in a narrower dtype."""

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids).to(torch.bfloat16)
        return rows.square().float().sum() + self.dense.weight.sum()


class CastWider(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        return rows.double().square().sum() + self.dense.weight.sum()


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, scale_grad_by_freq=True)


SHARD = ShardTables(("table.weight",), (), 0, 1)
SHARD_OF_TWO = ShardTables(("table.weight",), (), 0, 2)
BUCKETS = (("dense.bias",), ("dense.weight",))


@dataclass(frozen=True)
class Case:
    """A pass on a model it rewrites, after the passes that come before it."""

    name: str
    model: Callable[[], nn.Module]
    before: tuple[Pass, ...]
    rewrite: Pass


GOLDEN = (
    Case("eager_dropout", Dropped, (), EagerDropout()),
    Case("shard_tables", Plain, (), SHARD_OF_TWO),
    Case("narrow_exchange", Cast, (SHARD_OF_TWO,), NarrowExchange()),
    Case("global_frequency", Scaled, (), GlobalFrequency(2)),
    Case("reduce_gradients", Plain, (SHARD_OF_TWO,), ReduceGradients(BUCKETS, 2)),
)

SAME_VALUES = (
    Case("shard_tables", Plain, (), SHARD),
    Case("narrow_exchange", Cast, (SHARD,), NarrowExchange()),
    Case("partition", Plain, (SHARD,), Partition()),
    Case("partition with dropout", Dropped, (EagerDropout(), SHARD), Partition()),
)

UNTOUCHED = (
    Case("no dropout", Plain, (), EagerDropout()),
    Case("no table to shard", Plain, (), ShardTables((), (), 0, 2)),
    Case("no cast", Plain, (SHARD_OF_TWO,), NarrowExchange()),
    Case("a cast to a wider dtype", CastWider, (SHARD_OF_TWO,), NarrowExchange()),
    Case("no frequency", Plain, (), GlobalFrequency(2)),
    Case("one rank counts for itself", Scaled, (), GlobalFrequency(1)),
    Case("no bucket", Plain, (), ReduceGradients((), 2)),
)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
def test_golden(case: Case) -> None:
    graph = apply(analysed(case.model(), IDS), *case.before)
    before = text(graph.module)
    after = case.rewrite(graph)
    assert text(graph.module) == before, "a pass leaves its input as it was"
    check_golden(f"pass_{case.name}", text(after.module))


def test_golden_phases() -> None:
    graph = apply(analysed(Plain(), IDS), SHARD_OF_TWO, ReduceGradients(BUCKETS, 2), Partition())
    printed = "\n\n".join(f"# {name}\n{text(module)}" for name, module in graph.phases.items())
    check_golden("pass_partition", printed)


def test_golden_captured() -> None:
    graph = FindTables()(analysed(Plain(), IDS))
    found = re.sub(r"source='[^']*'", "source=...", str(graph.tables[0]))  # a path of this machine
    check_golden("captured", f"{text(graph.module)}\n\n{found}")


@pytest.mark.parametrize("case", SAME_VALUES, ids=lambda case: case.name)
def test_a_pass_computes_its_inputs_values(case: Case) -> None:
    torch.manual_seed(0)
    model = case.model()
    before = apply(analysed(model, IDS), *case.before)
    assert_equal_outputs(run_graph(case.rewrite(before), model, IDS), run_graph(before, model, IDS))


def test_eager_dropout_is_eagers() -> None:
    torch.manual_seed(0)
    model = Dropped()
    (loss,) = (
        value
        for role, value in run_graph(EagerDropout()(analysed(model, IDS)), model, IDS, seed=7).items()
        if value.dim() == 0
    )
    torch.manual_seed(7)
    assert torch.equal(loss, model(IDS).detach())


@pytest.mark.parametrize("case", UNTOUCHED, ids=lambda case: case.name)
def test_nothing_matched_is_the_same_graph(case: Case) -> None:
    graph = apply(analysed(case.model(), IDS), *case.before)
    assert case.rewrite(graph) is graph


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        return (rows @ self.table.weight.t()).square().sum()


class Renormed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4, max_norm=1.0)


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(6, 4, mode="max")

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.table(ids).square().sum()
        return loss


class TwoPaddings(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        other = nn.functional.embedding(ids, self.table.weight, padding_idx=1)
        loss: Tensor = self.dense(self.table(ids) + other).square().sum()
        return loss


class LearnedIds(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        chosen = self.dense.weight.argmax(dim=0)
        rows: Tensor = self.table(chosen)
        others: Tensor = self.table(ids)
        return rows.square().sum() + others.sum()


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Plain, None),
        (Dropped, None),
        (Tied, "also read densely"),
        (Renormed, "max_norm"),
        (Largest, "max mode"),
        (TwoPaddings, "disagree on padding_idx"),
        (Scaled, "scale_grad_by_freq"),
        (LearnedIds, "depend on parameters"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_which_tables_may_be_sharded(model: Callable[[], nn.Module], reason: str | None) -> None:
    found = shard_blocker(table_of(analysed(model(), IDS), "table.weight"))
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason in found


def test_a_graph_without_its_gradient_still_shards() -> None:
    graph: TrainingGraph = analysed(Plain(), IDS, train=False)
    sharded = SHARD(graph)
    assert "embrace.all_to_all_rows.default" in text(sharded.module)
    assert "coalesce" not in text(sharded.module)
