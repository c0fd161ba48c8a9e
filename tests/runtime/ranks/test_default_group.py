"""Which ranks a model trains with, where the user names none: those of the default group at the first call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.support.beside import ids, train
from tests.support.ranks import run_ranks, run_ranks_expecting_errors
from tests.support.tagger import Scorer


def _train(model: nn.Module, rank: int) -> list[float]:
    batches = [(ids(step, rank, 2, 4),) for step in range(3)]
    return [loss.item() for loss in train(model, batches, partial(torch.optim.SGD, lr=0.1))]


@contextlib.contextmanager
def _before_init_process_group() -> Iterator[None]:
    """Hides the default group of the pool, as before a script calls `init_process_group`."""
    group = dist.group.WORLD
    dist.group.WORLD = None
    try:
        yield
    finally:
        dist.group.WORLD = group


def _compiled_before_the_group(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(rank)  # ranks differ; `compile` broadcasts rank 0's parameters
    with _before_init_process_group():
        model = embrace_fx.compile(Scorer(50, 8, scores=3), strategy="alltoall")
    torch.manual_seed(rank)
    reference = DistributedDataParallel(Scorer(50, 8, scores=3))
    return _train(model, rank), _train(reference, rank)


def test_a_model_compiled_before_the_group_trains_with_all_of_its_ranks() -> None:
    for found, expected in run_ranks(2, _compiled_before_the_group):
        assert found == pytest.approx(expected, rel=1e-6)


def _normalised(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(4)
    plain = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 1))
    with _before_init_process_group():
        model = embrace_fx.compile(plain)
    for _ in range(2):
        model(torch.randn(5, 3) + rank).sum().backward()
    with torch.no_grad():
        model.eval()(torch.randn(5, 3))
    assert norm.running_mean is not None
    return norm.running_mean.tolist()


def test_a_model_compiled_before_the_group_shares_its_buffers() -> None:
    first, second = run_ranks(2, _normalised)
    assert first == second


def _differs(rank: int, world_size: int) -> None:
    model = Scorer(50, 8, scores=3)
    model.out = nn.Linear(8, 3 + rank)
    with _before_init_process_group():
        compiled = embrace_fx.compile(model)
    compiled(torch.tensor([[1]]))


def test_models_compiled_before_the_group_are_compared_at_the_first_call() -> None:
    for error in run_ranks_expecting_errors(2, _differs):
        assert "parameter out.weight is (4, 8)" in str(error)


def _gone(rank: int, world_size: int) -> None:
    compiled = embrace_fx.compile(Scorer(50, 8, scores=3))
    with _before_init_process_group(), pytest.raises(RuntimeError, match="has been destroyed or replaced"):
        compiled(torch.tensor([[1]]))


def test_a_group_that_is_replaced_after_compile_is_refused() -> None:
    run_ranks(1, _gone)


def test_a_launcher_without_a_group_is_refused_at_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    compiled = embrace_fx.compile(Scorer(50, 8, scores=3))
    with pytest.raises(RuntimeError, match="WORLD_SIZE is 2, so each rank would train alone") as raised:
        compiled(torch.tensor([[1]]))
    assert "\n" not in str(raised.value)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert compiled(torch.tensor([[1]])).requires_grad


def _initialised_late(rank: int, world_size: int) -> None:
    with _before_init_process_group():
        compiled = embrace_fx.compile(Scorer(50, 8, scores=3))
        compiled(torch.tensor([[1]]))
    compiled(torch.tensor([[1]]))


def test_a_group_that_comes_after_the_first_call_is_refused() -> None:
    for error in run_ranks_expecting_errors(2, _initialised_late):
        assert "initialized after the model's first call" in str(error)
