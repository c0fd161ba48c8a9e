"""The benchmark at the smallest size: every method trains, and what is found is written down."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.admm.__main__ import tuned_rates, wanted
from benchmarks.admm.methods import METHODS, OPTIMIZERS, train
from benchmarks.admm.parallel import Outcome as ParallelOutcome
from benchmarks.admm.report import write_parallel, write_stability
from benchmarks.admm.tasks import sentiment, text


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_within_its_passes(method: str) -> None:
    rate = OPTIMIZERS[method][1][1] if method in OPTIMIZERS else None
    outcome = train(sentiment(train=48, test=48), method, rate, seed=0, scale=1.0, passes=4)
    assert len(outcome.curve) == 2
    assert outcome.curve[-1] == outcome.accuracy
    assert 0 < outcome.accuracy <= 1


def test_tasks_say_something_to_learn() -> None:
    words = sentiment()
    assert 0.4 < float(words.train[1].float().mean()) < 0.6
    characters = text()
    assert characters.train[0].shape == (*characters.train[1].shape, characters.classes)
    assert (characters.train[0][:, 1:].argmax(-1) == characters.train[1][:, :-1]).all()  # the next one at every step


def test_rates_are_tuned_at_a_seed_that_is_not_judged(tmp_path: Path) -> None:
    done = {}
    for key in wanted({}):
        _, _, rate, seed, _ = key
        if seed == 1000:
            done[key] = {"accuracy": 0.5 + (rate == 0.01) / 4, "curve": [0.5, 0.6], "wall_s": 0.1}
    rates = tuned_rates(done, "digits")
    assert rates == {"ADMM": None, "SGD": 0.01, "momentum": 0.01, "Adagrad": 0.01, "Adam": 0.01}
    judged = {key for key in wanted(done) if key not in done}
    assert len(judged) == 3 * 5 * 5 * 4

    outcomes = {key: {"accuracy": 0.9 if key[4] < 5 else 0.1, "curve": [0.5, 0.9], "wall_s": 0.1} for key in judged}
    by_task = {task: tuned_rates(done, task) for task in ("digits", "text", "sentiment")}
    write_stability(tmp_path, outcomes, by_task, expected=len(judged), passes=4)
    page = (tmp_path / "admm-stability.md").read_text(encoding="utf-8")
    assert "Partial" not in page
    assert len(re.findall(r"\| ADMM \| none \|.*\| 75% \|", page)) == 3
    assert len(json.loads((tmp_path / "admm-stability.json").read_text(encoding="utf-8"))["trainings"]) == len(judged)
    assert (tmp_path / "admm-stability.svg").read_text(encoding="utf-8").count("<polyline") == 15


def test_the_page_of_the_parallel_forms(tmp_path: Path) -> None:
    fast, slow = ParallelOutcome(0.9, 5.0, 60, "accuracy 0.9 was reached"), ParallelOutcome(0.9, 10.0, 20, None)
    rounds = [{"synchronous": slow, "asynchronous": fast}]
    write_parallel(tmp_path, {1: fast, 2: slow}, rounds, 0.88, slower=5, iteration_ms=200.0)
    page = (tmp_path / "admm-parallel.md").read_text(encoding="utf-8")
    assert "| 1 | 10.0 (20) | 5.0 (60) (not reached) | 2.00 |" in page
    assert json.loads((tmp_path / "admm-parallel.json").read_text(encoding="utf-8"))["rounds"][0][
        "asynchronous"
    ] == asdict(fast)
