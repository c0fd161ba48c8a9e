"""Output layers over sharded tables: which are found, what is in the way of others, and the same values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embrace_fx.passes.heads import head_blocker
from embrace_fx.passes.partition import Partition
from embrace_fx.passes.pipeline import run_passes
from embrace_fx.passes.shard import ShardTables
from embrace_fx.passes.shard_head import ShardHeads
from embrace_fx.passes.verifier.invariants import VerificationError, verify
from embrace_fx.vocabulary.graph import Gradient, GradientOfShard, Parameter, TrainingGraph, set_outputs
from embrace_fx.vocabulary.head import HeadPlan
from embrace_fx.vocabulary.plan import Grid
from tests.support.cases import crossed
from tests.support.golden import check_golden
from tests.support.graphs import IDS, D, V, analysed, targets, text

TABLE = "words.weight"
LABELS = torch.tensor([1, 2, -100, 4, 5, 6])


class Tied(nn.Module):
    """A tied model whose forward is a function of the test."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.bias = nn.Parameter(torch.zeros(V))
        self.own_forward = forward

    def logits(self, ids: Tensor) -> Tensor:
        return F.linear(self.words(ids).reshape(-1, D).tanh(), self.words.weight)

    def forward(self, *args: Any) -> Any:
        return self.own_forward(self, *args)


def graph_of(forward: Callable[..., Any], *args: Tensor, train: bool = True) -> TrainingGraph:
    torch.manual_seed(0)
    return analysed(Tied(forward).double(), *(args or (IDS, LABELS)), train=train)


def sharded(graph: TrainingGraph, chunks: int = 1) -> TrainingGraph:
    """Returns the graph of rank 1 of 2."""
    shard = ShardTables((TABLE,), (), 1, 2, {TABLE: Grid(2, 1)})
    return run_passes(graph, (ShardHeads({TABLE: HeadPlan(chunks)}, 1, 2), shard, Partition())).graph


def plain(model: Tied, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(ids), labels)


def with_everything(model: Tied, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """A bias, a soft cap, a loss in float32 that shifts the labels and weights classes, and the logits as a result."""
    logits = F.linear(model.words(ids).reshape(-1, D), model.words.weight, model.bias)
    capped = 30.0 * torch.tanh(logits / 30.0)
    return F.cross_entropy(capped.float()[:-1], labels[1:], (model.bias.detach() + 1).float()), capped


@pytest.mark.parametrize(
    ("name", "chunks", "forward"),
    [
        ("shard_head", 1, plain),
        ("shard_head_in_chunks", 2, with_everything),
        ("shard_head_smoothed", 1, lambda m, x, y: F.cross_entropy(m.logits(x), y, label_smoothing=0.1)),
    ],
)
def test_golden(name: str, chunks: int, forward: Callable[..., Any]) -> None:
    graph = sharded(graph_of(forward), chunks=chunks)
    lines = [text(graph.phases[phase]) for phase in ("forward", "backward")]
    check_golden(name, "\n".join([*lines, f"{graph.promised}", f"{graph.expected}"]))


FOUND: dict[str, Callable[..., Any]] = {
    "plain": plain,
    "a result too": lambda m, x, y: (F.cross_entropy(z := m.logits(x), y), z),
    "a result alone": lambda m, x, y: m.logits(x),
    "a bias": lambda m, x, y: F.cross_entropy(F.linear(m.words(x).reshape(-1, D), m.words.weight, m.bias), y),
    "a soft cap": lambda m, x, y: F.cross_entropy(30.0 * torch.tanh(m.logits(x) / 30.0), y),
    "a float32 loss": lambda m, x, y: F.cross_entropy(m.logits(x).float(), y),
    "shifted": lambda m, x, y: F.cross_entropy(m.logits(x)[:-1], y[1:]),
    "a sum": lambda m, x, y: F.cross_entropy(m.logits(x), y, reduction="sum"),
    "each": lambda m, x, y: F.cross_entropy(m.logits(x), y, reduction="none").square().sum(),
    "three dimensions": lambda m, x, y: F.cross_entropy(F.linear(m.words(x), m.words.weight).flatten(0, 1), y),
    "class weights": lambda m, x, y: F.cross_entropy(m.logits(x), y, m.bias.detach() + 1),
    "label smoothing": lambda m, x, y: F.cross_entropy(m.logits(x), y, label_smoothing=0.1),
    "label smoothing, each": lambda m, x, y: F.cross_entropy(m.logits(x), y, reduction="none", label_smoothing=0.1),
    "log-softmax": lambda m, x, y: F.nll_loss(F.log_softmax(m.logits(x), 1), y),
}


@pytest.mark.parametrize(("name", "train"), crossed([*FOUND], [True, False]))
def test_the_whole_table_and_its_logits_leave_the_graph(name: str, train: bool) -> None:
    graph = graph_of(FOUND[name], train=train)
    assert head_blocker(graph, TABLE) is None
    found = sharded(graph)
    shapes = [list(v.shape) for n in found.graph.nodes if isinstance(v := n.meta.get("val"), Tensor)]
    known = [[each if type(each) is int else -1 for each in shape] for shape in shapes]
    assert not any(V in shape and len(shape) > 1 and 1 not in shape for shape in known)


IN_THE_WAY: dict[str, Callable[..., Any]] = {
    "argmax": lambda m, x, y: (F.cross_entropy(z := m.logits(x), y), z.argmax(1)),
    "smoothing of its own": lambda m, x, y: F.nll_loss(z := m.logits(x).log_softmax(1), y) + (-z.sum(1)).mean(),
    "smoothing and class weights": lambda m, x, y: F.cross_entropy(
        m.logits(x), y, m.bias.detach() + 1, label_smoothing=0.1
    ),
    "a tensor on logits": lambda m, x, y: F.cross_entropy(m.logits(x) * m.bias, y),
    "rows of logits": lambda m, x, y: (plain(m, x, y), m.logits(x)[:, :2]),
    "a part of logits": lambda m, x, y: m.logits(x)[:2],
    "two losses": lambda m, x, y: F.cross_entropy(z := m.logits(x), y) + F.cross_entropy(z * 2.0, y),
    "the loss per class": lambda m, x, y: F.nll_loss(z := m.logits(x).log_softmax(1), y) + z.exp().mean(),
    "a matrix": lambda m, x, y: torch.addmm(m.bias[:3, None], m.words(x)[0], m.words.weight.t()).logsumexp(1).sum(),
    "a penalty": lambda m, x, y: plain(m, x, y) + m.words.weight.square().sum(),
    "no head": lambda m, x, y: m.words(x).sum(),
    "another softmax": lambda m, x, y: F.log_softmax(m.logits(x), 0).sum(),
    "class dimension": lambda m, x, y: F.cross_entropy(m.logits(x).view(2, 3, V).transpose(1, 2), y.view(2, 3)),
}


def test_golden_of_what_is_in_the_way() -> None:
    found = {name: head_blocker(graph_of(forward), TABLE) for name, forward in IN_THE_WAY.items()}
    lines = "\n".join(f"{name}: {why}" for name, why in found.items())
    check_golden("heads_in_the_way", re.sub(r"[^\s]*?(\w+\.py):\d+", r"\1", lines))


def test_no_head_leaves_the_graph_itself() -> None:
    graph = graph_of(lambda m, x, y: m.words(x).sum())
    assert ShardHeads({TABLE: HeadPlan()}, 0, 2)(graph) is graph
    assert ShardHeads({}, 0, 2)(graph) is graph


def test_counts_travel_before_the_forward_computes() -> None:
    forward = targets(sharded(graph_of(plain)).phases["forward"].graph)
    assert forward.index("embrace::gather_counts") < forward.index("aten::embedding")


def _launch_unawaited(graph: TrainingGraph) -> None:
    node = next(n for n in graph.graph.nodes if n.name.endswith("all_coefficients_done"))
    node.replace_all_uses_with(node.all_input_nodes[0])


def _gradient_lost(graph: TrainingGraph) -> None:
    kept = [(value, role) for value, role in graph.outputs() if not isinstance(role, GradientOfShard)]
    set_outputs(graph.module, [(value, role) for value, role in kept if role != Gradient(Parameter(TABLE))])


def _gradient_twice(graph: TrainingGraph) -> None:
    of_shard = [(value, role) for value, role in graph.outputs() if isinstance(role, GradientOfShard)]
    set_outputs(graph.module, [*graph.outputs(), *of_shard])


def _size_of_another_rank(graph: TrainingGraph) -> None:
    node = next(n for n in graph.graph.nodes if n.name.endswith("_counts"))
    node.args = (*node.args[:-2], 3, node.args[-1])


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (_launch_unawaited, "in_flight_values_unread"),
        (_gradient_lost, "parameters_updated_once"),
        (_gradient_twice, "parameters_updated_once"),
        (_size_of_another_rank, "collectives_in_one_order|values_agree"),
    ],
)
def test_illegal_twins_are_refused(break_it: Callable[[TrainingGraph], None], expected: str) -> None:
    captured = graph_of(plain)
    legal = ShardHeads({TABLE: HeadPlan()}, 1, 2)(captured)
    verify(legal, after="ShardHeads", captured=captured)
    broken = legal.edit()
    break_it(broken)
    with pytest.raises(VerificationError, match=expected):
        verify(broken, after="ShardHeads", captured=captured)
