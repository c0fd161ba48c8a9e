"""Replicas whose gradients are exchanged sparsely: training, the graph, the launch, and what the plan predicted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import embrace_fx
from embrace_fx.cost import Cluster
from embrace_fx.plan import EXCHANGES
from embrace_fx.runtime.exchanges.in_place import ExchangeKind, ExchangeThread
from embrace_fx.schedule import SCHEDULES, ScheduleName
from tests.cases import long_but
from tests.models import MODELS
from tests.ranks import run_ranks, run_ranks_expecting_errors
from tests.reference import assert_same
from tests.training import Way, expected_parameters, train_compiled

WORKLOADS = dict(MODELS)
STEPS = 14
"""Enough for the order that follows the profile."""


@dataclass(frozen=True)
class Case:
    """One training through every strategy."""

    model: str
    world_size: int
    optimizer: str
    schedule: ScheduleName = "2d"


CASES = {
    f"{model}-{n}-{optimizer}": Case(model, n, optimizer)
    for model, n, optimizer in product(WORKLOADS, (1, 2, 3, 4), ("sgd", "adagrad", "adam"))
} | {f"schedule {name}": Case("two_table_lm", 2, "adam", name) for name in SCHEDULES}


@pytest.mark.parametrize("case", long_but(("tied_lm-2-sgd",), {k: (c,) for k, c in CASES.items()}))
def test_training_equals_the_reference(case: Case) -> None:
    workload = WORKLOADS[case.model]
    expected = expected_parameters(case.world_size, workload, torch.float64, case.optimizer, steps=STEPS)
    for strategy in EXCHANGES:
        way = Way(strategy, case.schedule, steps=STEPS)
        for found in run_ranks(case.world_size, train_compiled, workload, torch.float64, case.optimizer, "exact", way):
            assert set(found.strategies.values()) == {strategy}
            assert_same(found.parameters, expected, torch.float64)


class Pruned(nn.Module):
    """A linear layer of which few inputs are ever there, between a table and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6)
        self.wide = nn.Linear(300, 6)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        loss: Tensor = (self.table(ids) * self.wide(features)).square().mean()
        return loss


def _train_pruned(rank: int, world_size: int, strategy: dict[str, str]) -> tuple[dict[str, Tensor], str]:
    torch.manual_seed(0)
    model = Pruned().double()
    compiled = embrace_fx.compile(model, optimizer=torch.optim.Adam(model.parameters(), 0.01), strategy=strategy)
    for step in range(4):
        random = torch.Generator().manual_seed(10 * step + rank)
        features = torch.zeros(5, 300, dtype=torch.float64)
        features[:, torch.randint(300, (7,), generator=random)] = 1.0
        compiled(torch.randint(40, (5,), generator=random), features).backward()
        compiled.optimizer.step()
        compiled.optimizer.zero_grad()
    parameters = {name: value.detach().clone() for name, value in compiled.named_parameters()}
    return parameters, str(compiled.graphs["reduce_gradients"].graph)


@pytest.mark.parametrize("strategy", EXCHANGES)
def test_a_dense_parameter_may_be_exchanged_too(strategy: str) -> None:
    """Its own gradient has zeros where inputs are absent: here in columns, and it is one row set per output."""
    expected = run_ranks(3, _train_pruned, {"*": "allreduce"})
    for (found, graph), (reference, plain) in zip(
        run_ranks(3, _train_pruned, {"wide.*": strategy}), expected, strict=True
    ):
        assert_same(found, reference, torch.float64)
        assert graph.count("exchange_gradient_") == 2  # weight and bias
        assert "exchange_gradient_" not in plain


# -- the thread --------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 50, 3


def _gradient(rank: int, k: int) -> Tensor:
    random = torch.Generator().manual_seed(100 * k + rank)
    dense = torch.randint(-4, 5, (ROWS, WIDTH), generator=random).double()
    return dense * (torch.rand(ROWS, 1, generator=random) < 0.2)


def _exchange_many(rank: int, world_size: int) -> list[tuple[Tensor, int]]:
    thread = ExchangeThread(dist.new_group(list(range(world_size))), Cluster())
    started = [
        thread.start(_gradient(rank, k).view(-1), ExchangeKind(ROWS, strategy, ""))
        for k, strategy in enumerate(EXCHANGES)
    ]
    found = []
    for each in started:
        each.work.get_future().wait()
        assert each.sent_bytes is not None
        found.append((each.value, each.sent_bytes()))
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exchanges_in_place_are_the_mean(world_size: int) -> None:
    for found in run_ranks(world_size, _exchange_many):
        for k, (mean, sent_bytes) in enumerate(found):
            expected = torch.stack([_gradient(rank, k) for rank in range(world_size)]).sum(0) / world_size
            assert torch.equal(mean, expected.view(-1)), EXCHANGES[k]
            assert sent_bytes > 0


def _start_a_bad_one(rank: int, world_size: int) -> None:
    thread = ExchangeThread(dist.new_group(list(range(world_size))), Cluster())
    thread.start(torch.ones(7), ExchangeKind(3, "zen", "")).work.get_future().wait()


def test_an_exchange_that_fails_tells_whoever_waits() -> None:
    for error in run_ranks_expecting_errors(2, _start_a_bad_one):
        assert "shape" in str(error)
