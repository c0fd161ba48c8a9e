"""A measured step that leaves the predicted one is told, with an option to try; one that does not is not."""

from __future__ import annotations

import pytest

from embrace_fx.viz.why import LEFT, compare_to_prediction
from embrace_fx.vocabulary.operation_id import compute_id
from embrace_fx.vocabulary.schedule import Operation, Schedule, ScheduleName, Span, StepGraph, Timeline
from embrace_fx.vocabulary.step_parts import SHARES, Share

STEP_MS = 100.0


def schedule(name: ScheduleName) -> Schedule:
    """Returns a schedule whose steps consist of `STEP_MS` ms of compute."""
    operation = Operation.from_id(compute_id("backward", "a"), STEP_MS)
    spans = tuple(Span(operation, window, 0, window * STEP_MS, (window + 1) * STEP_MS) for window in range(2))
    return Schedule(name, (), StepGraph((operation,), (), ()), Timeline(spans, (), 1))


def shares(**ms: float) -> dict[Share, float]:
    return {part: ms.get(part, 0.0) for part in SHARES}


@pytest.mark.parametrize("part", [1 - 0.9 * LEFT, 1.0, 1 + 0.9 * LEFT])
def test_a_step_as_predicted_is_not_told(part: float) -> None:
    assert compare_to_prediction(shares(backward=part * STEP_MS, loader=1000.0), schedule("2d")) == ""


@pytest.mark.parametrize(
    ("name", "measured", "told"),
    [
        ("2d", {"backward": 140.0}, ("40.0 ms more in compute", "schedule='none'")),
        ("2d", {"backward": 100.0, "dense": 60.0}, ("60.0 ms more in waits", "schedule='none'")),
        ("none", {"backward": 100.0, "dense": 60.0}, ("60.0 ms more in waits", "schedule='2d'")),
        ("none", {"backward": 140.0}, ("40.0 ms more in compute", "backend='inductor'")),
        ("none", {"backward": 50.0}, ("50.0 ms less in compute", "cluster=embrace_fx.Cluster")),
        ("2d", {"backward": 50.0}, ("50.0 ms less in compute", "cluster=embrace_fx.Cluster")),
    ],
)
def test_another_step_is_told_with_an_option(
    name: ScheduleName, measured: dict[str, float], told: tuple[str, str]
) -> None:
    found = compare_to_prediction(shares(**measured), schedule(name))
    assert "but 100.0 ms were predicted" in found
    assert all(each in found for each in told), found
