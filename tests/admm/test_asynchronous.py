"""Asynchronous consensus on real ranks: a master, workers of their own pace, and what becomes of late and dead ones."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embrace_fx import admm
from embrace_fx.admm.asynchronous import Contributions
from embrace_fx.admm.progress import Sums
from embrace_fx.runtime.ranks.failure import DeadRank
from tests.admm.problems import modules, weighed_words
from tests.support.ranks import Outcome, RankDied, fresh_ranks, run_ranks

STEPS, WORDS, HIDDEN = 5, 6, 12
DATA = weighed_words(240, STEPS, seed=0, words=WORDS)


def shard(rank: int, workers: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's data. The master has all of the data, because it evaluates the weights."""
    return DATA if rank == 0 else (DATA[0][rank - 1 :: workers], DATA[1][rank - 1 :: workers])


@dataclass(frozen=True)
class Result:
    parameters: list[Tensor]
    history: list[admm.Progress]
    best_iteration: int
    stopped: str | None


def run(
    rank: int,
    world_size: int,
    parallel: admm.Asynchronous,
    iterations: int,
    on_iteration: Callable[[admm.Progress], object] | None = None,
    state: admm.State | None = None,
    save: Path | None = None,
) -> Result:
    rnn, head = modules(WORDS, HIDDEN, 2, seed=rank)
    state = admm.train(
        rnn,
        head,
        shard(rank, world_size - 1),
        iterations=iterations,
        parallel=parallel,
        on_iteration=on_iteration,
        state=state,
    )
    if save is not None:
        state.save(save)
    parameters = [parameter.detach() for parameter in (*rnn.parameters(), *head.parameters())]
    return Result(parameters, state.history, state.best.iteration, state.stopped)


def _one_slow(rank: int, world_size: int, staleness: int) -> Result:
    began_s = [time.perf_counter()]

    def slow_down(progress: admm.Progress) -> None:
        """Makes worker 1 five times as slow, independent of the machine's load."""
        if rank == 1:
            time.sleep(min(0.3, 4 * (time.perf_counter() - began_s[0])))  # the first one includes set-up
            began_s[0] = time.perf_counter()

    return run(rank, world_size, admm.Asynchronous(arrivals=1, staleness=staleness, patience_s=10), 150, slow_down)


@pytest.mark.long
def test_a_slow_worker_holds_nobody_up_within_the_staleness_bound() -> None:
    """Its contributions are older than others', never older than allowed, and the model is learned all the same."""
    master, slow, fast = run_ranks(3, _one_slow, 6)
    ages = [progress.staleness for progress in master.history]
    assert 2 <= max(ages) < 6
    assert len(fast.history) > 1.5 * len(slow.history)
    assert max(progress.accuracy for progress in master.history) > 0.85
    for worker in (slow, fast):
        assert worker.best_iteration == master.best_iteration
        assert worker.stopped == "the master ended the training"
        assert all(torch.equal(p, q) for p, q in zip(worker.parameters, master.parameters, strict=True))


def report(value: float) -> tuple[Sums, Tensor]:
    return Sums(sequences=1.0), torch.tensor([value])


def test_who_is_waited_for() -> None:
    heard = Contributions(torch.zeros(1), 3, admm.Asynchronous(arrivals=2, staleness=2), known=True)
    assert heard.missing() == [1, 2, 3]
    heard.store(2, *report(3.0))
    assert heard.missing() == [1, 3]
    heard.store(3, *report(6.0))
    assert heard.missing() == []
    vector, arrived, oldest = heard.update()
    assert (vector.tolist(), arrived, oldest) == ([3.0], {2, 3}, 1)

    heard.store(2, *report(0.0))
    heard.store(3, *report(0.0))
    assert heard.missing() == [1]  # worker 1's last report is two updates old
    heard.store(1, *report(9.0))
    vector, arrived, oldest = heard.update()
    assert (vector.tolist(), arrived, oldest) == ([3.0], {1, 2, 3}, 0)
    assert heard.sums().sequences == 3.0


def test_after_a_break_everybody_is_heard_first() -> None:
    heard = Contributions(torch.zeros(1), 2, admm.Asynchronous(arrivals=1, staleness=5), known=False)
    heard.store(1, *report(1.0))
    assert heard.missing() == [2]


PATIENCE_S = 3.0


def _fail(rank: int, world_size: int, victim: int, how: str) -> None:
    def fail(progress: admm.Progress) -> None:
        if rank == victim and progress.iteration == 3:
            if how == "dies":
                os._exit(3)
            time.sleep(2 * PATIENCE_S)

    run(rank, world_size, admm.Asynchronous(staleness=3, patience_s=PATIENCE_S), 10_000, fail)


def errors(outcomes: list[Outcome[None]], victim: int) -> list[BaseException | None]:
    return [outcome.exception for rank, outcome in enumerate(outcomes) if rank != victim]


@pytest.mark.long
@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.long)])
def test_a_rank_that_dies_is_named_by_all_others(victim: int) -> None:
    outcomes = fresh_ranks(3, _fail, victim, "dies")
    assert isinstance(outcomes[victim].exception, RankDied)
    for error in errors(outcomes, victim):
        assert isinstance(error, DeadRank), error
        assert f"Rank {victim} no longer answers" in str(error)
