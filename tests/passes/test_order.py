"""A backward's compute in another order: every order is legal, and yields the same values."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor, fx, nn

import embrace_fx
from embrace_fx.passes.overlap.order import BackwardUnits, OrderCompute
from embrace_fx.passes.pipeline import overlap_passes, run_passes, training_passes
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import op_name
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import Cuts
from tests.support.graphs import analysed
from tests.support.inside import graphs_in_order
from tests.support.language_models import passes_of
from tests.support.ranks import run_ranks

ROWS, DIM = 60, 8
TABLES = ("words.weight", "tags.weight")


class Tagger(nn.Module):
    """Two tables, dropout, a recurrent layer, a normalisation that writes its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM)
        self.tags = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.norm = nn.BatchNorm1d(DIM)
        self.rnn = nn.LSTM(DIM, DIM, batch_first=True)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(self.words(ids).mT).mT
        y, _ = self.rnn(nn.functional.dropout(x, 0.5, self.training))
        scores: Tensor = (self.out(y) * self.tags(targets)).sum(-1)
        return scores.square().mean()


BUCKETS = (("out.weight", "out.bias"), ("rnn.weight_ih_l0", "rnn.weight_hh_l0"), ("rnn.bias_ih_l0", "rnn.bias_hh_l0"))
SIZES = (DIM * DIM + DIM, 8 * DIM * DIM, 8 * DIM)


@pytest.fixture(scope="module")
def overlapped() -> TrainingGraph:
    sizes = (*SIZES, 2 * DIM)
    passes = passes_of(TABLES, (ROWS, DIM), dict(zip((*BUCKETS, ("norm.weight", "norm.bias")), sizes, strict=True)))
    torch.manual_seed(0)
    captured = analysed(Tagger(), *(torch.randint(1, ROWS, (4, 5)) for _ in range(2)))
    return run_passes(captured, passes).graph


def units_of(graph: TrainingGraph) -> BackwardUnits:
    return BackwardUnits.find(graph.phases["backward"])


def test_every_order_of_units_passes_the_verifier(overlapped: TrainingGraph) -> None:
    units = units_of(overlapped).units
    assert set(units) == {*TABLES, *(f"bucket {k}" for k in range(4))}
    for order in list(permutations(units))[::60]:
        found = OrderCompute(order)(overlapped)
        verify(found, after="OrderCompute", captured=overlapped, previous=overlapped)
        assert units_of(found).units == order
        assert sorted(n.name for n in overlapped.phases["backward"].graph.nodes) == sorted(
            n.name for n in found.phases["backward"].graph.nodes
        )


def test_the_order_that_stands_changes_nothing(overlapped: TrainingGraph) -> None:
    once = OrderCompute(units_of(overlapped).units)(overlapped)
    assert OrderCompute(units_of(overlapped).units)(once) is once
    assert OrderCompute(())(overlapped) is overlapped


def test_a_gradient_of_weights_waits_for_the_table_that_goes_ahead(overlapped: TrainingGraph) -> None:
    """What the table's gradient hangs on goes ahead with it, what the weights alone need does not."""
    found = OrderCompute(("words.weight",))(overlapped)
    names = [op_name(node) for node in found.phases["backward"].graph.nodes]
    before = names[: names.index("embrace::submit_gradients")]
    assert "embrace::rnn_layer_backward" in before
    assert "embrace::pack_bucket" not in before
    assert before.count("aten::mm") == 1  # only the gradient of the output layer's input


def test_the_head_stays_ahead_of_all(overlapped: TrainingGraph) -> None:
    found = OrderCompute(tuple(reversed(units_of(overlapped).units)))(overlapped)
    head = [op_name(n) for n in found.phases["backward"].graph.nodes if n.op == "call_function"][:7]
    assert set(head) == {"embrace::update_rows", "embrace::await_ids", "embrace::submit_rows"}


def _reordered(rank: int, world_size: int) -> list[list[tuple[str, ...]]]:
    torch.manual_seed(0)
    model = embrace_fx.compile(Tagger(), strategy="alltoall")
    for length in (5, 3):
        model(*(torch.randint(1, ROWS, (4, length)) for _ in range(2))).backward()
    graphs = (graphs_in_order(model, order) for order in (TABLES, TABLES[::-1]))
    return [[tuple(unit for unit in units_of(each).units if unit in TABLES) for each in found] for found in graphs]


def test_every_program_of_a_model_is_put_in_the_new_order() -> None:
    assert run_ranks(2, _reordered) == [[[TABLES] * 2, [TABLES[::-1]] * 2]] * 2


class Drawing(nn.Module):
    """Two layers whose backwards draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(_noisy(self.a(_noisy(x))))
        return found.square().mean()


class _Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad * torch.rand_like(grad)


def _noisy(x: Tensor) -> Tensor:
    return _Noisy.apply(x)  # type: ignore[no-untyped-call]


def draws_in(nodes: list[fx.Node]) -> list[str]:
    return [n.name for n in nodes if n.op == "call_function" and "rand" in op_name(n)]


def test_random_draws_keep_their_order() -> None:
    plan = Plan(2, (), (("b.weight", "b.bias"), ("a.weight", "a.bias")))
    cuts = Cuts(((DIM * DIM + DIM,),) * 2, ())
    captured = analysed(Drawing(), torch.randn(4, DIM, requires_grad=True))
    graph = run_passes(captured, (*training_passes(plan, (), 0), *overlap_passes(plan, "horizontal", 0, cuts))).graph
    backward = graph.phases["backward"]
    found = OrderCompute(("bucket 1", "bucket 0"))(graph).phases["backward"]
    assert len(draws_in(list(backward.graph.nodes))) == 2
    assert draws_in(list(found.graph.nodes)) == draws_in(list(backward.graph.nodes))


def test_what_a_backward_holds_is_counted_in_the_order_that_is_asked_for(overlapped: TrainingGraph) -> None:
    units, memory = units_of(overlapped), step_memory(overlapped)
    peaks = {memory.backward_peak(units.order_nodes(order)) for order in list(permutations(units.units))[::40]}
    assert len(peaks) > 1
    assert min(peaks) > 0


@pytest.mark.parametrize("order", [("rnn",), ()], ids=str)
def test_an_evaluation_stays_as_it_is(order: tuple[str, ...]) -> None:
    graph = analysed(Tagger().eval(), *(torch.randint(1, ROWS, (4, 5)) for _ in range(2)))
    assert OrderCompute(order)(graph) is graph
