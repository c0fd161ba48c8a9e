"""Models that no graph holds train as under DDP: the same losses, gradients, parameters and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.eager.models import CASES, Case
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning"),  # DDP's
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

STEPS = 8
QUICK = ("experts", "packing", "recommender")


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
