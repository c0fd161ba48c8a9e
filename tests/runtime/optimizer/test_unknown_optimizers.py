"""Optimizers that no row update is known of, and closures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.words import Batch, words_batch, words_model


class OwnSGD(SGD):
    """May do anything, as far as the compiler knows."""


def _line_search(model: nn.Module) -> Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


UNKNOWN_OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "OwnSGD": lambda model: OwnSGD(model.parameters(), lr=0.1),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.1, eps=1e-3),
    "LBFGS": _line_search,
}


def _losses(model: nn.Module, batches: Sequence[Batch]) -> list[Tensor]:
    return [model(*batch) for batch in batches]


def _closure(optimizer: Optimizer, losses: Callable[[], Sequence[Tensor]]) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([*losses()]).mean()
        loss.backward()
        return loss

    return closure


def _train_with_unknown(rank: int, world_size: int, name: str) -> tuple[str, str, dict[str, Tensor]]:
    plain = words_model()
    optimizer = UNKNOWN_OPTIMIZERS[name](plain)
    model = embrace_fx.compile(plain, optimizer=optimizer)
    for step in range(3):
        batch = words_batch(step, rank)
        optimizer.step(_closure(optimizer, partial(_losses, model, [batch])))
    decision = model.plan["table.weight"]
    return decision.strategy, decision.reason, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", UNKNOWN_OPTIMIZERS)
def test_the_tables_of_an_unknown_optimizer_stay_data_parallel(name: str) -> None:
    model = words_model()
    optimizer = UNKNOWN_OPTIMIZERS[name](model)
    for step in range(3):
        batches = [words_batch(step, rank) for rank in range(2)]
        optimizer.step(_closure(optimizer, partial(_losses, model, batches)))
    expected = {name: p.detach() for name, p in model.named_parameters()}

    for strategy, reason, parameters in run_ranks(2, _train_with_unknown, name):
        assert strategy == "allreduce"
        assert reason == f"{name} is not known to update rows"
        assert_same(parameters, expected, torch.float64)


def _mean_loss(rank: int, world_size: int) -> tuple[float, float]:
    plain = words_model()
    optimizer = SGD(plain.parameters(), lr=0.1)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy="alltoall")
    own: list[Tensor] = []

    def losses() -> list[Tensor]:
        own.append(model(*words_batch(0, rank)))
        return own

    return optimizer.step(_closure(optimizer, losses)).item(), own[0].item()


def test_the_loss_of_a_closure_is_the_mean_over_ranks() -> None:
    found = run_ranks(2, _mean_loss)

    mean = sum(own for _, own in found) / 2
    assert [loss for loss, _ in found] == pytest.approx([mean, mean], rel=1e-12)
