"""A rank that calls the model alone, while others wait for it elsewhere: refused in seconds, and training goes on."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import embrace_fx
from embrace_fx.runtime.ranks import failure
from embrace_fx.runtime.ranks.failure import PeerFailure
from tests.support.ranks import run_ranks, run_ranks_expecting_errors
from tests.support.scenarios.schemes import Words, ids_of

LIMIT_S = 30.0
"""On a machine with other work; a second where there is none."""
LOOKS_S = 0.25


def _adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), 0.02, eps=1e-3)


def _step(optimizer: torch.optim.Adam, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _alone(rank: int, world_size: int, deed: str, steps: int, *, catches: bool) -> list[Any]:
    """As loops do that keep the best model: rank 0 evaluates it, or saves it, while the others wait in a barrier."""
    torch.manual_seed(0)
    model = embrace_fx.compile(Words(), strategy="alltoall")
    optimizer = _adam(model)
    for k in range(steps + 2):
        if k == steps and rank == 0:
            began_s = time.monotonic()
            with pytest.raises((RuntimeError, TypeError)) if catches else contextlib.nullcontext(), torch.no_grad():
                DEEDS[deed](model)
            assert time.monotonic() - began_s < LIMIT_S
            time.sleep(2 * LOOKS_S)
        if k == steps:
            dist.barrier()
        _step(optimizer, model(ids_of(rank, k)).square().mean())
    return [*embrace_fx.full_state_dict(model).values()]


DEEDS: dict[str, Callable[[Any], object]] = {
    "call": lambda model: model(ids_of(9, 0)),
    "module": lambda model: model.module(ids_of(9, 0)),
    "save": lambda model: torch.save(model.state_dict(), io.BytesIO()),
    "a table's call": lambda model: model.module.words(ids_of(9, 0)),
    "a method": lambda model: model.module.encode(ids_of(9, 0)),
    "a functional call": lambda model: torch.func.functional_call(
        model.module, dict(model.module.named_parameters()), ids_of(9, 0)
    ),
    "nearest rows": lambda model: (model.module.words.weight[:2] @ model.module.words.weight.t()).topk(3),
    "several batches": lambda model: [model.eval()(ids_of(9, k)).sum().item() for k in range(3)],
    "a lookup": lambda model: F.embedding(ids_of(9, 0), model.module.words.weight),
}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("deed", DEEDS)
def test_all_ranks_are_told_what_one_cannot_do_alone(deed: str, ranks: int) -> None:
    """The barriers of the other ranks raise the reason instead of "connection closed"."""
    for rank, error in enumerate(run_ranks_expecting_errors(ranks, partial(_alone, catches=False), deed, 2)):
        told = str(error)
        assert isinstance(error, PeerFailure) or rank == 0
        assert "rank" in told
        assert "`with model.whole()" in told
        if deed in ("call", "module"):
            assert "join()" in told


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_first_call_of_one_rank_is_refused_on_all(ranks: int) -> None:
    one, *others = run_ranks(ranks, partial(_alone, catches=True), "call", 0)
    for other in others:
        torch.testing.assert_close(one, other)


def _other_model(rank: int, world_size: int) -> None:
    models = [embrace_fx.compile(Words(), strategy="alltoall") for _ in range(2)]
    for model in models:
        _step(_adam(model), model(ids_of(rank, 0)).square().mean())
    models[rank](ids_of(rank, 1))


def test_ranks_that_call_different_models_are_refused() -> None:
    began_s = time.monotonic()
    errors = run_ranks_expecting_errors(2, _other_model)
    assert time.monotonic() - began_s < LIMIT_S
    assert any("is in another model's call" in str(error) for error in errors)


class Labelled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of = Words()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.of.encode(ids), labels)


def _catches_alone(rank: int, world_size: int, bad_ids: int, bad_labels: int) -> None:
    """Catches the error of a batch on rank 0, and runs a small batch instead."""
    failure.PATIENCE_S = 2.0  # shortens the wait for the rank that ends
    model = embrace_fx.compile(Labelled(), strategy="alltoall")
    optimizer = _adam(model)
    for k in range(4):
        ids, labels = ids_of(rank, k), torch.zeros_like(ids_of(rank, k))
        bad = rank == 0 and k == 2
        try:
            loss = model(ids + bad_ids * bad, labels + bad_labels * bad)
        except (IndexError, RuntimeError):
            if rank > 0:
                raise
            loss = model(ids[:1], labels[:1])
        _step(optimizer, loss)


@pytest.mark.parametrize(
    ("bad_ids", "bad_labels", "told"),
    [(1000, 0, "got id 1016"), pytest.param(0, 50, "IndexError: Target 50", marks=pytest.mark.long)],
)
def test_an_error_that_one_rank_catches_and_the_others_do_not(bad_ids: int, bad_labels: int, told: str) -> None:
    one, other = run_ranks_expecting_errors(2, _catches_alone, bad_ids, bad_labels)
    for error in (one, other):
        assert isinstance(error, PeerFailure)
        assert told in str(error)
    assert "other ranks stopped because of it" in str(one)
