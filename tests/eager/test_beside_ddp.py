"""Models that no graph holds train as under DDP: the same losses, gradients, parameters and buffers."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from embrace_fx.cost.links import Cluster
from embrace_fx.vocabulary.plan import BY_ROWS
from tests.eager.models import CASES, Asserting, Case, labelled
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning"),  # DDP's
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

STEPS = 8
QUICK = ("experts", "packing", "recommender", "spectral")


def _train(model: nn.Module, case: Case, rank: int, *, sparse: bool) -> tuple[list[float], list[Tensor | None]]:
    """The losses of a loop, and the last gradients."""
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1) if sparse else adam
    losses, gradients = [], list[Tensor | None]()
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        loss = model(*case.batch(step, rank))
        loss.backward()
        gradients = [p.grad.to_dense().clone() if p.grad is not None else None for p in model.parameters()]
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


def _beside_ddp(rank: int, world_size: int, names: list[str], strategy: Any) -> dict[str, str]:
    """By case, how the route names itself; asserts that both loops are one."""
    torch.set_default_dtype(torch.float64)
    routes = {}
    for name in names:
        case, made = CASES[name], []
        for _ in range(2):
            torch.manual_seed(0)
            made.append(case.make())
        ddp = DistributedDataParallel(made[0], find_unused_parameters=name != "checkpointed")
        theirs = _train(ddp, case, rank, sparse=name == "sparse")
        compiled = embrace_fx.compile(made[1], strategy=strategy)
        ours = _train(compiled, case, rank, sparse=name == "sparse")
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-9, atol=1e-12)
        for own, other in zip(ours[1], theirs[1], strict=True):
            assert (own is None) == (other is None)
            if own is not None:
                torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
        for (key, own), other in zip(made[1].state_dict().items(), made[0].state_dict().values(), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12, msg=f"{name}: {key}")
        routes[name] = compiled.report().rpartition("route: ")[2]
        compiled.close()
    return routes


@pytest.mark.parametrize("name", QUICK)
def test_training_equals_ddp(name: str) -> None:
    for routes in run_ranks(2, _beside_ddp, [name], "auto"):
        assert routes[name].startswith("eager")


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(CASES) - set(QUICK)))
def test_more_models_train_as_under_ddp(name: str) -> None:
    for routes in run_ranks(2, _beside_ddp, [name], "auto"):
        assert routes[name].startswith("eager")


@pytest.mark.long
def test_three_ranks_train_as_under_ddp() -> None:
    run_ranks(3, _beside_ddp, list(CASES), "auto")


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allgather", "zen", "omnireduce", "ps"])
def test_every_exchange_yields_the_gradients_of_ddp(strategy: str) -> None:
    run_ranks(3, _beside_ddp, ["asserting", "recommender", "sparse"], strategy)


def _train_rows(model: Any, rank: int) -> list[float]:
    """The losses of a loop whose tables' gradients are of layout COO, some of them sums of two backwards."""
    tables = [p for name, p in model.named_parameters() if "rows" in name]
    optimizers = [
        torch.optim.SparseAdam(tables, lr=1e-2),
        torch.optim.AdamW([p for p in model.parameters() if all(p is not table for table in tables)], lr=1e-2),
    ]
    losses = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with model.no_sync() if step % 2 else contextlib.nullcontext():
            model(*labelled(100 + step, rank)).backward()
        loss = model(*labelled(step, rank))
        loss.backward()
        assert step < 2 or all(table.grad.is_sparse for table in tables)  # by then the plan is made for gradients
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def _rows_beside_ddp(rank: int, world_size: int, strategy: str) -> None:
    torch.set_default_dtype(torch.float64)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Asserting(sparse=True))
    theirs = _train_rows(DistributedDataParallel(made[0]), rank)
    compiled = embrace_fx.compile(made[1], strategy={"rows.weight": strategy})
    torch.testing.assert_close(_train_rows(compiled, rank), theirs, rtol=1e-9, atol=1e-12)
    for (key, own), other in zip(made[1].state_dict().items(), made[0].state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12, msg=key)
    assert compiled.plan["rows.weight"].strategy == strategy
    compiled.close()


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["allgather", "zen", "ps"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_in_rows_stay_in_rows(strategy: str, world_size: int) -> None:
    run_ranks(world_size, _rows_beside_ddp, strategy)


class Wide(nn.Module):
    """A table of which a batch reads next to nothing."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding(20_000, 32, sparse=sparse)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.rows(ids).square().mean()
        return loss


def _strategies(rank: int, world_size: int, sparse: bool, bytes_per_ms: float) -> list[str]:
    """The strategies of a table, step by step."""
    cluster = Cluster(bandwidth_bytes_per_ms=bytes_per_ms)
    compiled = embrace_fx.compile(Wide(sparse=sparse), route="eager", cluster=cluster)
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
def test_the_exchange_is_planned_for_the_rows_that_gradients_have() -> None:
    for first, *_, last in run_ranks(2, _strategies, False, 12_500.0):
        assert first == "allreduce"
        assert last in BY_ROWS


@pytest.mark.long
def test_gradients_of_rows_are_not_filled_up_however_fast_the_link_is() -> None:
    for strategies in run_ranks(2, _strategies, True, 1e9):
        assert set(strategies) <= set(BY_ROWS)
