"""Plans of models whose output layer is as large as their table: the faster of the two ways, for any batch."""

from __future__ import annotations

import pytest
import torch

import embrace_fx
from embrace_fx.passes.planner.plan_fit import unshardable_tables
from tests.support.cases import crossed
from tests.support.graphs import analysed
from tests.support.heads import IGNORED, HeadWorkload, PredictsBoth

ETHERNET = embrace_fx.Cluster(12.5e3, 0.1)


SIZES = (1000, 8), (1000, 64), (1000, 512), (30000, 8), (30000, 512)


@pytest.mark.parametrize(("size", "tied"), crossed(SIZES, [False, True]))
def test_auto_picks_the_faster(size: tuple[int, int], tied: bool) -> None:
    num_words, length = size
    workload = HeadWorkload(tied=tied, num_words=num_words, width=128)
    words = torch.randint(num_words, (4, length), generator=torch.Generator().manual_seed(0))
    model = workload.make(torch.float32, seed=0)
    plan = embrace_fx.plan(model, (words, words), world_size=8, cluster=ETHERNET)
    decision = plan[workload.table]
    ms = {each.strategy: each.predicted_ms for each in decision.candidates}
    assert decision.strategy == ("vocabulary" if ms["vocabulary"] < 0.8 * ms["allreduce"] else "allreduce")
    assert (ms["vocabulary"] < ms["allreduce"]) == (8 * words.numel() < num_words)
    assert (decision.head is not None) == (decision.strategy == "vocabulary")


def test_positions_without_labels_cost_nothing() -> None:
    workload = HeadWorkload(tied=False, num_words=30000, width=128, kind=PredictsBoth)
    words = torch.randint(30000, (4, 512), generator=torch.Generator().manual_seed(0))
    model = workload.make(torch.float32, seed=0)
    labels = words.masked_fill(torch.arange(512) >= 64, IGNORED)
    every, few = (
        embrace_fx.plan(model, (words, own), world_size=8, cluster=ETHERNET, strategy={workload.table: "vocabulary"})
        for own in (words, labels)
    )
    sent = [plan.heads[workload.table].sent_bytes for plan in (every, few)]
    assert sent[1] == pytest.approx(sent[0] / 8)
    assert every.heads[workload.table].chunks >= few.heads[workload.table].chunks > 1


@pytest.mark.long
def test_a_window_holds_every_exchange_of_positions() -> None:
    workload = HeadWorkload(num_words=30000, width=128)
    words = torch.randint(30000, (4, 512), generator=torch.Generator().manual_seed(0))
    asked = {workload.table: "vocabulary"}
    plan = embrace_fx.plan(
        workload.make(torch.float32, seed=0), (words, words), world_size=8, cluster=ETHERNET, strategy=asked
    )
    chunks, steps = plan.heads[workload.table].chunks, plan.schedule.steps
    exchanges = [each for each in steps.operations if each.kind == "positions"]
    assert len(exchanges) == 3 + 3 * chunks > 6
    sent = sum(each.sent_bytes for each in exchanges)
    assert sent == pytest.approx(plan.heads[workload.table].sent_bytes, rel=1e-3)
    for each in exchanges:
        assert {d.after for d in steps.dependences if d.before == each.name} & {*steps.compute_order}
    statistics = {d.before for d in steps.dependences if d.after == f"{workload.table} statistics [0]"}
    assert f"forward up to {workload.table} statistics [0]" in statistics
    assert plan.schedule.diagnostics().exposed_ms["embedding"] > 0


@pytest.mark.parametrize("world_size", [2, 16, 1024])
def test_one_asks_for_any_number_of_ranks(world_size: int) -> None:
    workload = HeadWorkload(num_words=2_000_000, width=4, bias=True)
    with torch.device("meta"):
        model = workload.make(torch.float32, seed=0)
    words = torch.randint(1000, (2, 5))
    asked = embrace_fx.plan(model, (words, words), world_size=world_size, strategy={"head.weight": "vocabulary"})
    decision = asked[workload.table]  # a tied table: the plan uses its first name, the strategy another one
    assert str(decision.grid) == f"{world_size} x 1 grid"
    assert "output layer sharded" in decision.reason
    assert asked.schedule is not None


def test_a_hidden_layer_is_read_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    assert [*unshardable_tables(analysed(model, torch.ones(2, 4)))] == ["0.weight"]


def test_what_is_in_the_way_is_the_reason() -> None:
    workload = HeadWorkload(num_words=5)
    words = torch.randint(5, (2, 5))
    model = workload.make(torch.float32, seed=0)
    asked = embrace_fx.plan(model, (words, words), world_size=4, strategy={workload.table: "vocabulary"})
    assert "cannot share its 5 rows evenly" in asked[workload.table].reason
    alone = embrace_fx.plan(model, (words, words), world_size=1, strategy={workload.table: "vocabulary"})
    assert alone[workload.table].strategy == "allreduce"
