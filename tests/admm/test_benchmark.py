"""The benchmark at the smallest size: every method trains, and what is found is written down."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.admm import pixels
from benchmarks.admm.__main__ import Done, Key, train, tuned_rate, wanted
from benchmarks.admm.methods import METHODS, OPTIMIZERS
from benchmarks.admm.report import write_stability
from benchmarks.admm.tasks import sentiment, text


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_for_its_epochs(method: str) -> None:
    rate = OPTIMIZERS[method][1][1] if method in OPTIMIZERS else None
    outcome = train(sentiment(train=32, test=32), Key("sentiment", method, "rescaled", rate, 0, 1.0), epochs=4)
    assert len(outcome.curve) == len(outcome.losses) == 2
    assert outcome.curve[-1] == outcome.accuracy
    assert 0 < outcome.accuracy <= 1


def test_tasks_say_something_to_learn() -> None:
    words = sentiment()
    assert 0.4 < float(words.train[1].float().mean()) < 0.6
    characters = text()
    assert characters.train[0].shape == (*characters.train[1].shape, characters.classes)
    assert (characters.train[0][:, 1:].argmax(-1) == characters.train[1][:, :-1]).all()  # the next one at every step


def test_an_image_is_one_step_of_all_its_pixels() -> None:
    pytest.importorskip("sklearn", reason="digits come with scikit-learn, of the extra `benchmarks`")
    images = pixels.task_of_pixels(train=20)
    assert images.train[0].shape == (20, 1, 64)


def test_rates_are_tuned_at_a_seed_that_is_not_judged(tmp_path: Path) -> None:
    done: Done = {}
    for key in wanted({}):
        if key.seed == 1000:
            done[key] = {"accuracy": 0.5 + (key.rate == 0.01) / 4, "curve": [0.5, 0.6], "losses": [1.0, 0.9]}
    assert {method: tuned_rate(done, "digits", method) for method in OPTIMIZERS} == dict.fromkeys(OPTIMIZERS, 0.01)
    judged = {key for key in wanted(done) if key not in done}
    assert len(judged) == 3 * 5 * (4 + 4 + 4 * 4)

    outcomes = {key: {"accuracy": 0.9 if key.scale < 5 else 0.1, "curve": [0.5, 0.9], "losses": []} for key in judged}
    for key in judged:
        if key.seed == 3 and key.scale == 1.0 and key.start == "rescaled" and key.method in {"ADMM", "Adam"}:
            outcomes[key] |= {"accuracy": {"ADMM": 0.86, "Adam": 0.91}[key.method]}
    write_stability(tmp_path, outcomes, epochs=4)
    page = (tmp_path / "admm-stability.md").read_text(encoding="utf-8")
    assert len(re.findall(r"\| ADMM \| rescaled \| none \|.*\| 15 of 20 \|", page)) == 3
    assert (
        page.count("worst at seed 3: 0.860, 95% of the best optimizer at that seed (Adam, start rescaled, 0.910)") == 3
    )
    assert len(re.findall(r"\| Adam \| rescaled \| 0.01 \|.*\| 5 of 5 \|", page)) == 3
    assert len(json.loads((tmp_path / "admm-stability.json").read_text(encoding="utf-8"))["trainings"]) == len(judged)
    assert (tmp_path / "admm-stability.svg").read_text(encoding="utf-8").count("<polyline") == 15
