"""Replicas whose gradients are exchanged sparsely: training, the graph, and the launch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import embrace_fx
from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges.in_place import Exchange, ExchangeKind, ExchangeThread, exchange_gradient_
from embrace_fx.vocabulary.plan import EXCHANGES
from tests.support.ranks import run_ranks, run_ranks_expecting_errors
from tests.support.reference import assert_same


class Pruned(nn.Module):
    """Multiplies a table's rows by the output of a linear layer, most of whose inputs are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6)
        self.wide = nn.Linear(300, 6)

    def forward(self, ids: Tensor, features: Tensor) -> Tensor:
        return (self.table(ids) * self.wide(features)).square().mean()


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


@pytest.mark.long
@pytest.mark.parametrize("strategy", EXCHANGES)
def test_a_dense_parameter_may_be_exchanged_too(strategy: str) -> None:
    """Its own gradient has zeros where inputs are absent: here in columns, and it is one row set per output."""
    expected = run_ranks(3, _train_pruned, {"*": "allreduce"})
    for (found, graph), (reference, plain) in zip(
        run_ranks(3, _train_pruned, {"wide.*": strategy}), expected, strict=True
    ):
        assert_same(found, reference, torch.float64)
        assert graph.count("exchange_gradient_") == 2  # one for the weight, one for the bias
        assert "exchange_gradient_" not in plain


def _exchange(kind: ExchangeKind) -> Exchange:
    return lambda flat, _, channel: exchange_gradient_(flat, kind, channel, Cluster())


def _start_a_bad_one(rank: int, world_size: int) -> None:
    thread = ExchangeThread(dist.new_group(list(range(world_size))))
    thread.start(_exchange(ExchangeKind(3, "zen", "balanced")), torch.ones(7), "zen").work.get_future().wait()


def test_an_exchange_that_fails_tells_whoever_waits() -> None:
    for error in run_ranks_expecting_errors(2, _start_a_bad_one):
        assert "shape" in str(error)
