"""Whatever a model is made of, a budget changes no bit: what has left memory is spoiled, and its graph run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from embrace_fx.cost.links import CORE
from embrace_fx.passes.dropout import EagerDropout
from embrace_fx.passes.memory.budget import Memory
from embrace_fx.passes.memory.copy_placement import NO_COPIES, CopyRate
from embrace_fx.passes.partition import Partition
from embrace_fx.passes.pipeline import run_passes
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.vocabulary.copy_ops import OFFLOAD
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import op_name
from tests.support.checkpointed import IDS, WIDTH, WORDS, Normalised, Recurrent, doubled
from tests.support.graphs import Outputs, analysed, run_graph


class Layer(nn.Module):
    """A linear layer, followed by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.linear(x))


def drops_out(h: Tensor) -> Tensor:
    return nn.functional.dropout(nn.functional.dropout(h.tanh(), 0.2) * h, 0.5)


def writes_in_place(h: Tensor) -> Tensor:
    y = h * 3.0
    y[..., : WIDTH // 2].mul_(2.0)
    return y.add_(1.0).relu_() * h


def makes_views(h: Tensor) -> Tensor:
    first, second = h.exp().clamp(max=9.0).chunk(2, -1)
    return torch.cat([first.transpose(0, 1).sin().transpose(0, 1), second.unflatten(-1, (2, -1)).cos().flatten(-2)], -1)


def uses_a_storage_twice(h: Tensor) -> Tensor:
    y = h.tanh()
    return y.view(-1).sin().view_as(h) * y.transpose(0, 1).cos().transpose(0, 1) + y.square()


def calls_a_custom_op(h: Tensor) -> Tensor:
    return doubled(doubled(h).sigmoid()).square()


def computes_without_gradients(h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.rand_like(h) * h.abs().mean()
    return (h.sin() * scale).cos()


PARTS: Mapping[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Layer(drops_out),
    "batch norm": Normalised,
    "in place": lambda: Layer(writes_in_place),
    "views": lambda: Layer(makes_views),
    "a storage used twice": lambda: Layer(uses_a_storage_twice),
    "a custom op": lambda: Layer(calls_a_custom_op),
    "no_grad": lambda: Layer(computes_without_gradients),
    "an RNN": Recurrent,
}


class Tied(nn.Module):
    """Words in and out by one table; the last hidden values are a result, twice, and a view of them is another."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.parts = nn.ModuleList(PARTS[name]() for name in parts)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        x = self.table(ids)
        for part in self.parts:
            x = part(x)
        x = x.contiguous()  # `run_graph` passes contiguous gradients for the results
        return (x @ self.table.weight.t()).logsumexp(-1).mean(), x, x, x[:, -1]


def spoiling() -> dict[str, Callable[..., object]]:
    """Copies out of memory and back, behind which what has left is no longer what it was."""

    def spoil(leaving: tuple[Tensor, Tensor], _: str) -> Tensor:
        value, copied = leaving
        storage = value.untyped_storage()
        torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).fill_(0xFF)
        return copied

    return {
        "embrace::offload": lambda value, _: (value, value.clone()),
        "embrace::await_offload": spoil,
        "embrace::reload": lambda stored, _: stored.clone(),
        "embrace::await_reload": lambda coming, _: coming,
    }


def within(graph: TrainingGraph, budget: float, copies: CopyRate) -> TrainingGraph:
    """The graph within a budget; within the least that can be where that is more."""
    try:
        return run_passes(graph, (Memory(budget, CORE, copies), Partition())).graph
    except ValueError as error:
        least = re.search(r"at least ([\d,]+)", str(error))
        assert least is not None
        return run_passes(graph, (Memory(float(least[1].replace(",", "")), CORE, copies), Partition())).graph


def run(graph: TrainingGraph, model: nn.Module) -> Outputs:
    return run_graph(graph, model, IDS, kernels=spoiling())


def assert_no_bit_differs(parts: Sequence[str], budgets: Sequence[float], copies: CopyRate) -> list[TrainingGraph]:
    torch.manual_seed(0)
    model = Tied(parts)
    plain = run_passes(analysed(model, IDS), (EagerDropout(),)).graph
    expected = run(plain, model)
    graphs = []
    for budget in budgets:
        graph = within(plain, budget, copies)

        found = run(graph, model)

        assert step_memory(graph).peak_bytes <= (graph.memory_limit or 0)
        assert found.keys() == expected.keys()
        assert [role for role, value in expected.items() if not torch.equal(found[role], value)] == []
        graphs.append(graph)
    return graphs


FAST = CopyRate(1e9)
"""So fast that offloading is always the better choice."""


@pytest.mark.long
@pytest.mark.parametrize("copies", [NO_COPIES, FAST], ids=["again", "offloaded"])
def test_no_bit_differs_of_a_model_that_has_it_all(copies: CopyRate) -> None:
    graphs = assert_no_bit_differs(list(PARTS), (0.8, 0.4), copies)
    nodes = [node for graph in graphs for node in graph.graph.nodes]
    assert any("again" in node.meta for node in nodes)
    assert any(op_name(node) == OFFLOAD for node in nodes) == (copies is FAST)


@pytest.mark.long
@pytest.mark.timeout(1800)  # captures a model for each of thirty examples
@settings(max_examples=30)
@given(
    parts=st.lists(st.sampled_from(list(PARTS)), min_size=1, max_size=4),
    budget=st.floats(0.2, 0.95),
    copies=st.sampled_from([NO_COPIES, FAST, CopyRate(1e5, 0.01), CopyRate(1e6, 0.01, 0.5)]),
)
def test_no_bit_differs(parts: list[str], budget: float, copies: CopyRate) -> None:
    assert_no_bit_differs(parts, (budget,), copies)
