"""Models that no graph holds train as under DDP: the same losses, gradients, parameters and buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.cost.links import Cluster
from embrace_fx.vocabulary.plan import BY_ROWS
from tests.eager.models import CASES, Asserting, Case, labelled
from tests.support.beside import check
from tests.support.cases import long_but
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning"),  # warned by DDP
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

STEPS = 8
QUICK = ("experts", "packing", "recommender", "spectral")


def _trains(name: str, case: Case) -> Callable[[Any, int], list[Any]]:
    """Trains a model, and returns the losses and the last gradients."""

    def loop(model: Any, rank: int) -> list[Any]:
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if name == "sparse" else adam
        losses, gradients = [], list[Any]()
        for step in range(STEPS):
            torch.manual_seed(100 * step + rank)
            optimizer.zero_grad()
            losses.append(model(*case.batch(step, rank)))
            losses[-1].backward()
            gradients = [p.grad.to_dense().clone() if p.grad is not None else None for p in model.parameters()]
            optimizer.step()
        return [[loss.detach() for loss in losses], gradients]

    return loop


MODELS = {name: (case.make, _trains(name, case)) for name, case in CASES.items()}


def check_models(*names: str, ranks: int = 2, strategy: Any = "auto") -> None:
    for unused in (True, False):  # DDP cannot find unused parameters of a checkpointed forward
        some = [name for name in names if (name != "checkpointed") is unused]
        if some:
            how: dict[str, Any] = {"ranks": ranks, "strategy": strategy, "dtype": torch.float64, "says": "route: eager"}
            check(__name__, *some, cases="MODELS", ddp={"find_unused_parameters": unused}, rtol=1e-9, **how)


@pytest.mark.parametrize("name", long_but(QUICK, {name: (name,) for name in CASES}))
def test_training_equals_ddp(name: str) -> None:
    check_models(name)


@pytest.mark.long
def test_three_ranks_train_as_under_ddp() -> None:
    check_models(*CASES, ranks=3)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allgather", "zen", "omnireduce", "ps"])
def test_every_exchange_yields_the_gradients_of_ddp(strategy: str) -> None:
    check_models("asserting", "recommender", "sparse", ranks=3, strategy=strategy)


def _trains_rows(model: Any, rank: int) -> list[Tensor]:
    """Returns the losses of a loop with sparse COO gradients of tables. Some are accumulated over two backwards."""
    tables = [p for name, p in model.named_parameters() if "rows" in name]
    rest = [p for p in model.parameters() if all(p is not table for table in tables)]
    optimizers = [torch.optim.SparseAdam(tables, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
    losses = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with model.no_sync() if step % 2 else contextlib.nullcontext():
            model(*labelled(100 + step, rank)).backward()
        losses.append(model(*labelled(step, rank)))
        losses[-1].backward()
        assert step < 2 or all(table.grad.is_sparse for table in tables)  # the plan is made from the first gradients
        for optimizer in optimizers:
            optimizer.step()
    return [loss.detach() for loss in losses]


ROWS = {"rows": (lambda: Asserting(sparse=True), _trains_rows)}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allgather", "zen", "ps"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_in_rows_stay_in_rows(strategy: str, ranks: int) -> None:
    check(__name__, cases="ROWS", ranks=ranks, strategy={"rows.weight": strategy}, dtype=torch.float64, rtol=1e-9)


class Wide(nn.Module):
    """A model with a large table of which a batch reads very few rows."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(20_000, 32, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids).square().mean()


class Tied(Wide):
    """A model whose output layer gives every row of its table a gradient."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__(sparse=sparse)
        self.out = nn.Linear(32, 20_000, bias=False)
        self.out.weight = self.rows.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rows(ids)).square().mean()


def _strategies(rank: int, world_size: int, sparse: bool, bytes_per_ms: float, model: type[Wide] = Wide) -> list[str]:
    """Returns the strategy of a table after each step."""
    cluster = Cluster(bandwidth_bytes_per_ms=bytes_per_ms)
    compiled = embrace_fx.compile(model(sparse=sparse), route="eager", cluster=cluster)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    strategies = []
    for step in range(4):
        compiled(labelled(step, rank)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        strategies.append(compiled.plan["rows.weight"].strategy)
    compiled.close()
    return strategies


@pytest.mark.long
def test_the_exchange_is_planned_once_for_the_rows_that_a_batch_reads() -> None:
    for strategies in run_ranks(2, _strategies, False, 12_500.0):
        assert len({*strategies}) == 1
        assert strategies[0] in BY_ROWS


@pytest.mark.long
def test_a_tied_table_is_planned_once_for_all_rows() -> None:
    for strategies in run_ranks(2, _strategies, False, 12_500.0, Tied):
        assert strategies == ["allreduce"] * 4


@pytest.mark.long
def test_gradients_of_rows_are_not_filled_up_however_fast_the_link_is() -> None:
    for strategies in run_ranks(2, _strategies, True, 1e9):
        assert set(strategies) <= set(BY_ROWS)
