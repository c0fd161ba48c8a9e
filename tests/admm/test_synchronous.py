"""Synchronous consensus on real ranks: what it computes, that it learns, and that all refuse what one cannot do."""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embrace_fx import admm
from embrace_fx.admm.model import Data, read_data, read_weights, run_forward
from embrace_fx.admm.progress import Best
from embrace_fx.admm.setup import OUTPUTS, PREACTIVATIONS, rescale_weights
from embrace_fx.admm.update import run_epoch
from embrace_fx.admm.weights import Consensus
from embrace_fx.runtime.ranks.failure import DeadRank, PeerFailure
from tests.admm.problems import modules, weighed_words
from tests.support.ranks import RankDied, fresh_ranks, run_ranks, run_ranks_expecting_errors

SEQUENCES, STEPS, WORDS, HIDDEN = 240, 5, 6, 12


def shard(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    inputs, targets = weighed_words(SEQUENCES, STEPS, seed=0, words=WORDS)
    return inputs[rank::world_size], targets[rank::world_size]


@dataclass(frozen=True)
class Result:
    """What a rank returns after training."""

    parameters: list[Tensor]
    agreed: Tensor
    history: list[tuple[float, ...]]
    stopped: str | None


def result_of(state: admm.State, rnn: torch.nn.RNN, head: torch.nn.Linear) -> Result:
    parameters = [parameter.detach() for parameter in (*rnn.parameters(), *head.parameters())]
    history = [astuple(progress) for progress in state.history]
    return Result(parameters, state.agreed.flat(), history, state.stopped)


def _train(rank: int, world_size: int, iterations: int, dtype: torch.dtype = torch.float32) -> Result:
    rnn, head = modules(WORDS, HIDDEN, 2, seed=rank, dtype=dtype)  # training starts from rank 0's weights
    inputs, targets = shard(rank, world_size)
    data = inputs.to(dtype), targets
    state = admm.train(rnn, head, data, iterations=iterations, parallel=admm.Synchronous(strength=0.5))
    return result_of(state, rnn, head)


def test_ranks_compute_what_the_formulas_say() -> None:
    """z = mean of theta_i + u_i, u_i += theta_i - z, with all ranks' iterations made here one after the other."""
    results = run_ranks(2, _train, 2, torch.float64)
    rnn, head = modules(WORDS, HIDDEN, 2, dtype=torch.float64)
    seed = int(torch.randint(2**31, (1,)))
    given = read_weights(rnn, head)
    shards = []
    for rank in range(2):
        inputs, targets = shard(rank, 2)
        shards.append(read_data((inputs.double(), targets), given, batch_first=True))
    whole = Data(torch.cat([each.x_NBI for each in shards], 1), torch.cat([each.y_MB for each in shards], 1))
    start = rescale_weights(given, whole, list)
    values = run_forward(start, whole.x_NBI, 1)
    assert (values.cell_NBF @ start.cell_HF.t()).square().mean().sqrt() == pytest.approx(PREACTIVATIONS, rel=2e-4)
    assert values.o_MBC.square().mean().sqrt() == pytest.approx(OUTPUTS)
    states = [admm.State.begin(start, data, admm.Penalties(), Best(0, 1.0, given), seed) for data in shards]
    z = start.flat()
    duals = [torch.zeros_like(z), torch.zeros_like(z)]
    for _ in range(2):
        for state, data, u in zip(states, shards, duals, strict=True):
            state.agreed = start.from_flat(z)
            run_epoch(state, data, 16, Consensus(start.from_flat(z - u), 0.5))
            state.iteration += 1
        contributions = [state.weights.flat() + u for state, u in zip(states, duals, strict=True)]
        z = (contributions[0] + contributions[1]) / 2
        duals = [c - z for c in contributions]
    for result in results:
        torch.testing.assert_close(result.agreed, z, rtol=1e-8, atol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_reach_the_accuracy_of_one_process(world_size: int) -> None:
    """Accuracy is within two points, and all ranks have the same weights and the same figures."""
    rnn, head = modules(WORDS, HIDDEN, 2)
    alone = admm.train(rnn, head, shard(0, 1), iterations=20)
    results = run_ranks(world_size, _train, 20)
    best = {f.name: i for i, f in enumerate(fields(admm.Progress))}["accuracy"]
    accuracy = max(row[best] for row in results[0].history)
    assert accuracy >= max(progress.accuracy for progress in alone.history) - 0.02
    for other in results[1:]:
        assert [row[:-1] for row in other.history] == [row[:-1] for row in results[0].history]
        assert all(torch.equal(p, q) for p, q in zip(other.parameters, results[0].parameters, strict=True))


def _resume(rank: int, world_size: int, folder: Path) -> tuple[Result, Result]:
    whole = _train(rank, world_size, 9)
    path = folder / f"state-{rank}.pt"
    rnn, head = modules(WORDS, HIDDEN, 2, seed=rank)
    options: dict[str, Any] = {"parallel": admm.Synchronous(strength=0.5)}
    admm.train(rnn, head, shard(rank, world_size), iterations=4, **options).save(path)
    state = admm.train(rnn, head, shard(rank, world_size), iterations=9, state=admm.State.load(path), **options)
    return whole, result_of(state, rnn, head)


def test_a_resumed_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(2, _resume, tmp_path):
        assert [row[:-1] for row in resumed.history] == [row[:-1] for row in whole.history]
        assert all(torch.equal(p, q) for p, q in zip(whole.parameters, resumed.parameters, strict=True))


def _train_with_bad_input(rank: int, world_size: int, what: str) -> None:
    rnn, head = modules(WORDS, HIDDEN, 2)
    inputs, targets = shard(rank, world_size)
    iterations = 3
    if rank == 1 and what == "targets":
        targets = targets + 1
    if rank == 1 and what == "iterations":
        iterations = 4
    if rank == 1 and what == "no data":
        inputs = None  # type: ignore[assignment]  # a user's mistake
    parallel = admm.Synchronous() if what != "parallel" else None
    admm.train(rnn, head, (inputs, targets), iterations=iterations, parallel=parallel)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("targets", "rank 1: ValueError: admm.train(): data: the targets go from"),
        ("iterations", "rank 1: the call of admm.train() differs from rank 0's: iterations 4, not 3"),
        ("no data", "rank 1: AttributeError"),
    ],
)
def test_all_ranks_refuse_what_one_cannot_do(what: str, message: str) -> None:
    for error in run_ranks_expecting_errors(2, _train_with_bad_input, what):
        assert isinstance(error, PeerFailure)
        assert message in str(error)


def test_several_ranks_must_say_how_they_train() -> None:
    for error in run_ranks_expecting_errors(2, _train_with_bad_input, "parallel"):
        assert isinstance(error, ValueError)
        assert "would train a separate model on each" in str(error)


def test_ranks_need_a_process_group() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized"):
        admm.train(*modules(WORDS, HIDDEN, 2), shard(0, 1), parallel=admm.Synchronous())


def _die(rank: int, world_size: int) -> None:
    rnn, head = modules(WORDS, HIDDEN, 2)

    def die(progress: admm.Progress) -> None:
        if rank == 1 and progress.iteration == 2:
            os._exit(3)

    admm.train(rnn, head, shard(rank, world_size), iterations=50, parallel=admm.Synchronous(), on_iteration=die)


@pytest.mark.long
def test_a_rank_that_dies_is_named() -> None:
    first, second = fresh_ranks(2, _die)
    assert isinstance(second.exception, RankDied)
    assert isinstance(first.exception, DeadRank)
    assert "Rank(s) 1 no longer answer" in str(first.exception)
