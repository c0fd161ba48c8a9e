"""A step within a memory budget: the same bits, and no more held than allowed, or an error says the least that can."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.cost.links import CORE
from embrace_fx.passes.dropout import EagerDropout
from embrace_fx.passes.memory.budget import Memory, apply_choice
from embrace_fx.passes.memory.choose import TimedStep, eviction_sequences
from embrace_fx.passes.memory.copy_placement import NO_COPIES, CopyRate
from embrace_fx.passes.memory.memory_simulator import MemorySimulator
from embrace_fx.passes.memory.regions import can_recompute
from embrace_fx.passes.node_cost import node_ms, node_time_estimator
from embrace_fx.passes.pipeline import run_passes
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.vocabulary.copy_ops import COPY_OPS
from embrace_fx.vocabulary.graph import written_by
from embrace_fx.vocabulary.ops import op_name
from tests.support.budgets import IDS, make, measured, plain
from tests.support.checkpointed import FORMS, Block, Normalised, Odd, Recurrent, assert_equal_gradients, gradients
from tests.support.counted_memory import CountedMemory
from tests.support.golden import check_golden
from tests.support.graphs import analysed
from tests.support.inside import memory_limit_of, pipeline_of
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(
    "blocks", [Block, *(pytest.param(each, marks=pytest.mark.long) for each in (Normalised, Odd, Recurrent))]
)
@pytest.mark.parametrize("form", [pytest.param("plain", marks=pytest.mark.long), "nested"])
def test_what_is_predicted_is_what_is_held(form: str, blocks: Callable[[], nn.Module]) -> None:
    through = plain if form == "plain" else FORMS[form]
    compiled = embrace_fx.compile(make(blocks, through))
    saved, peak = measured(compiled.module, compiled)
    predicted: Any = pipeline_of(compiled).step_memory()
    states = sum(node.name.endswith("_state") for node in predicted.nodes) * 5056  # bytes of states, which no op makes
    assert predicted.peak_bytes == pytest.approx(peak + states, rel=0.05)
    assert predicted.saved_bytes == pytest.approx(saved + states, rel=0.05)


@pytest.mark.parametrize("blocks", [Normalised, *(pytest.param(each, marks=pytest.mark.long) for each in (Block, Odd))])
def test_what_is_simulated_of_a_choice_is_what_its_graph_holds(blocks: Callable[[], nn.Module]) -> None:
    graph = run_passes(analysed(make(blocks), IDS), (EagerDropout(),)).graph
    before, written = step_memory(graph), written_by(graph.module)
    step = TimedStep(before, node_time_estimator(CORE))
    simulator = MemorySimulator(step)
    for growing in eviction_sequences(step, lambda node: can_recompute(node, written)):
        for count in (1, len(growing) // 2, len(growing)):
            choice = growing.first(count)
            simulated, found = simulator.simulate(choice, 0), step_memory(apply_choice(graph, step, choice, 0))
            assert simulated.peak_bytes == pytest.approx(found.peak_bytes, abs=before.peak_bytes * 0.01 + 12 * 5056)


class Scored(nn.Module):
    """Two tables, the second one read next to the loss: the gradients of its rows are held through the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.items = nn.Embedding(5000, 32), nn.Embedding(5000, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, words: Tensor, items: Tensor) -> Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.items(items)).sum()


def scored(rank: int, most: int) -> tuple[Scored, tuple[Tensor, Tensor]]:
    """Returns the model and a batch that reads at most `most` rows."""
    torch.manual_seed(0)
    model = Scored()
    generator = torch.Generator().manual_seed(rank)
    return model, (torch.randint(most, (512,), generator=generator), torch.randint(most, (512,), generator=generator))


class Looped(nn.Module):
    """A layer that the loop over time computes, several of whose rows are wider than what it yields."""

    def __init__(self, cell: str) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.layer = nn.LSTM(16, 24, proj_size=16) if cell == "projected" else getattr(nn, cell)(16, 24)

    def forward(self, ids: Tensor) -> Tensor:
        output, _ = self.layer(self.words(ids))
        return output.square().mean()


@pytest.mark.parametrize(("cell", "steps"), [("projected", 2), ("GRU", 30), ("RNN", 2)])
def test_what_a_loop_over_time_computes_with_counts(cell: str, steps: int) -> None:
    torch.manual_seed(0)
    model, ids = Looped(cell), torch.randint(50, (steps, 8))
    compiled = embrace_fx.compile(model)
    gradients(model, compiled, ids)
    with CountedMemory([*model.parameters(), ids]) as counted:
        gradients(model, compiled, ids)
    predicted: Any = pipeline_of(compiled).step_memory()
    assert predicted.peak_bytes == pytest.approx(counted.peak_bytes, rel=0.05)
    held = zip(predicted.nodes, predicted.bytes_at_node, strict=True)
    check_golden(f"memory_{cell.lower()}", "\n".join(f"{n.name} {nbytes} {node_ms(n, CORE):.3g}" for n, nbytes in held))


SHARDED = {"words.weight": "alltoall", "items.weight": "alltoall"}


def test_rows_that_the_batch_reads_count() -> None:
    model, batch = scored(0, 5000)
    expected = gradients(model, lambda ids: model(*batch), batch[0])
    compiled = embrace_fx.compile(model, strategy=SHARDED, memory_budget=0.8)
    found = gradients(model, lambda ids: compiled(*batch), batch[0])
    with CountedMemory([*model.parameters(), *batch]) as counted:
        compiled(*batch).backward()
    assert_equal_gradients(found, expected)
    builder: Any = pipeline_of(compiled)
    assert any("again" in node.meta for node in builder.step_memory().nodes)
    assert counted.peak_bytes <= memory_limit_of(compiled)
    assert counted.peak_bytes == pytest.approx(builder.step_memory().peak_bytes, rel=1e-3)


def decided(rank: int, world_size: int) -> tuple[str, int, list[str]]:
    """Returns what a rank predicts and recomputes. One rank reads 50 rows, the other 5000."""
    model, batch = scored(rank, (50, 5000)[rank])
    compiled = embrace_fx.compile(model, strategy=SHARDED, memory_budget=0.8)
    compiled(*batch).backward()
    assert compiled.plan is not None
    found: Any = pipeline_of(compiled).step_memory()
    return str(compiled.plan.rows), found.peak_bytes, [node.name for node in found.nodes if "again" in node.meta]


@pytest.mark.long
def test_ranks_that_read_other_numbers_of_rows_decide_alike() -> None:
    first, second = run_ranks(2, decided)
    assert first == second
    assert first[2]


def test_golden_of_what_leaves_memory_and_comes_back() -> None:
    """Less memory costs more time, and no budget changes nothing."""
    graph = run_passes(analysed(make(Block), IDS), (EagerDropout(),)).graph
    assert Memory(1e12, CORE)(graph).module is graph.module
    lines, times = [" ".join(map(str, step_memory(graph).bytes_at_node))], []
    some = {NO_COPIES: (0.99, 0.8, 0.6, 0.5), CopyRate(1e9): (0.8, 0.5), CopyRate(1e6, 0.01, 0.5): (0.6, 0.5)}
    for copies, budgets in some.items():
        for budget in budgets:
            result = Memory(budget, CORE, copies)(graph)
            found = step_memory(result)
            times.append(sum(node_ms(n, CORE) for n in found.nodes))
            lines += [f"# {budget}, {copies}: {found.peak_bytes} of {result.memory_limit} bytes, {times[-1]:.4f} ms"]
            lines += [f"{k} {n.name}" for k, n in enumerate(found.nodes) if "again" in n.meta or op_name(n) in COPY_OPS]
            lines += [found.as_line()]
    assert times[:4] == sorted(times[:4])
    check_golden("budgets", "\n".join(lines))


def test_a_budget_that_cannot_be_met() -> None:
    compiled = embrace_fx.compile(make(Block), memory_budget=1000)
    with pytest.raises(PeerFailure, match=r"memory_budget: .*budget is 1,000") as raised:
        compiled(IDS)
    least = int(str(raised.value).split("at least ")[1].split(" ")[0].replace(",", ""))
    enough = embrace_fx.compile(make(Block), memory_budget=least)
    enough(IDS).backward()


def test_a_fraction_gives_way_to_the_least_that_a_batch_needs(caplog: pytest.LogCaptureFixture) -> None:
    """A batch so small that gradients are the peak trains, within what its step must hold; that is said once."""
    caplog.set_level(logging.INFO, "embrace_fx")
    wide = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
    compiled = embrace_fx.compile(copy.deepcopy(wide), memory_budget=0.2)
    for rows in (2, 2, 3):
        x = torch.randn(rows, 64)
        compiled(x).sum().backward()
    wide(x).sum().backward()
    limit = memory_limit_of(compiled)
    assert pipeline_of(compiled).step_memory().peak_bytes == limit
    assert limit >= 4 * 2 * 64 * 512  # two float32 gradients
    assert caplog.text.count("memory_budget=0.2 allows") == 1


@pytest.mark.parametrize("budget", [0, -1.0, "half"])
def test_a_budget_that_is_none(budget: Any) -> None:
    with pytest.raises(ValueError, match="memory_budget is"):
        embrace_fx.compile(make(Block), memory_budget=budget)


def test_the_report_says_what_is_held() -> None:
    compiled = embrace_fx.compile(copy.deepcopy(make(Block)))
    compiled(IDS).backward()
    assert "saved for the backward" in compiled.report()
    assert "most at a time" in compiled.report()
