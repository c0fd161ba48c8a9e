"""Pictures of the parallel forms: what each rank did and whom it waited for, from real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from embrace_fx import admm
from embrace_fx.admm import timeline
from embrace_fx.runtime.launch.recorder import Recording, Transfer
from embrace_fx.vocabulary.operation_id import OperationId
from tests.admm.problems import modules, weighed_words
from tests.support.ranks import run_ranks


def _draw(rank: int, world_size: int, folder: Path, asynchronous: bool) -> bool:
    parallel = admm.Asynchronous(patience_s=5) if asynchronous else admm.Synchronous()
    for suffix in ("svg", "json"):
        rnn, head = modules(6, 8, 2)
        data = weighed_words(30, 4, seed=rank)
        with mock.patch.object(timeline, "cut_by_time", side_effect=timeline.cut_by_time) as cut:
            admm.train(rnn, head, data, iterations=12, parallel=parallel, timeline=folder / f"timeline.{suffix}")
    return cut.called


@pytest.mark.parametrize(
    ("asynchronous", "exchange"), [(False, "AllReduce of weights"), (True, "weights to the master")]
)
def test_a_picture_shows_batches_and_exchanges_of_all_ranks(tmp_path: Path, asynchronous: bool, exchange: str) -> None:
    assert run_ranks(3, _draw, tmp_path, asynchronous) == [asynchronous] * 3
    picture = (tmp_path / "timeline.svg").read_text(encoding="utf-8")
    assert all(f">rank {rank}<" in picture for rank in range(3))
    trace = json.loads((tmp_path / "timeline.json").read_text(encoding="utf-8"))
    seen = {(event["pid"] - 1, event["name"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    workers = (1, 2) if asynchronous else (0, 1, 2)
    for name in ("forward pass", "states", "weights", exchange):
        assert {rank for rank, what in seen if what == name} == set(workers), name
    assert ((0, "mean of weights") in seen) == asynchronous


def test_asynchronous_ranks_are_drawn_in_spans_of_the_slowest_mean_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations take 2 s on this rank, and 1.5 s on the other one. In step, windows stay what they are."""
    of, drawn = OperationId("own", "weights"), list[Any]()
    marks: list[Any] = [(of, window, at_s) for window, at_s in ((0, 10.0), (0, 11.9), (0, 12.0), (1, 13.9), (1, 14.0))]
    recording = Recording(marks, [(of, 1, 11.9, 12.1)], [Transfer(of, 1, 8, 12.5, 13.0)], 1)
    monkeypatch.setattr(timeline, "gather_timeline", lambda ranks, recorded, steps: drawn.append(recorded))
    for rank, in_step in ((0, True), (0, False), (1, False)):
        monkeypatch.setattr("embrace_fx.viz.save", lambda path, **what: drawn.append((path, what)))
        ranks: Any = SimpleNamespace(rank=rank, gather=lambda own, kind: [own, 1.5])
        timeline.save_timeline("steps.svg", ranks, recording, in_step=in_step)
    of_time: list[Any] = [(of, window, at_s) for window, (_, _, at_s) in zip((0, 0, 1, 1, 2), marks, strict=True)]
    cut = Recording(of_time, [(of, 0, 11.9, 12.1)], [Transfer(of, 1, 8, 12.5, 13.0)], 2)
    assert drawn == [recording, saved := ("steps.svg", {"timeline": None}), cut, saved, cut]
