"""A window as operations and dependences, read from the graphs that run; and the story that becomes of it."""

from __future__ import annotations

import pytest

from embrace_fx.cost import links as cost
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.vocabulary.operation_id import OperationId, gradients_id
from embrace_fx.vocabulary.schedule import SCHEDULES, StepGraph
from tests.support.golden import check_golden
from tests.support.translators import BATCH, CHUNK, DIM, LENGTH, TABLES, steps_of_translator
from tests.support.windows import check_order, story


def before(steps: StepGraph, after: str | OperationId, distance: int = 0) -> set[str]:
    return {d.before for d in steps.dependences if d.after == str(after) and d.distance == distance}


def test_what_was_measured_takes_the_place_of_what_was_estimated() -> None:
    steps = steps_of_translator("2d", {gradients_id(TABLES[0], "prior"): 77})
    rows = BATCH * LENGTH * DIM * 4 * 3 // 4
    first, second = (steps[f"{table} prior"] for table in TABLES)
    assert (first.sent_bytes, second.sent_bytes) == (77, rows)
    assert first.duration_ms < second.duration_ms
    assert steps["ids"].sent_bytes == 3 * BATCH * LENGTH * 4
    assert steps["bucket 1 [0]"].sent_bytes == cost.all_reduce(CHUNK * 4, 4).sent_bytes
    assert steps[f"{TABLES[0]} delayed [1]"].sent_bytes == rows // 4


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_window_can_be_scheduled(name: str) -> None:
    steps = steps_of_translator(name)
    found = schedule(steps, name)
    check_order(steps, found.launch_order)
    assert sorted(found.launch_order) == sorted(o.name for o in steps.communications)
    assert tuple(map(str, found.launches)) == found.launch_order


def test_every_segment_of_compute_has_a_duration() -> None:
    computed = [each for each in steps_of_translator("2d").operations if each.kind in ("backward", "forward")]
    blocks = [each for each in computed if each.id is not None and each.id.what.startswith("bucket")]
    assert len(blocks) == 6
    assert all(each.duration_ms > 0 for each in blocks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_story(name: str) -> None:
    found = schedule(steps_of_translator(name), name)
    check_golden(f"story_{name}", story(found, times=False))


def test_no_gradient_leaves_behind_what_the_forward_submits_in_its_class() -> None:
    """One that did could not be had before the forward has begun, to clip it, say."""
    steps = steps_of_translator("2d")
    order = list(schedule(steps, "2d").launch_order)
    check_order(steps, order)
    prior = order.pop(order.index("target.weight prior"))
    order.insert(order.index("source.weight rows") + 1, prior)
    with pytest.raises(ValueError, match=r"has .source\.weight rows. before .target\.weight prior."):
        check_order(steps, order)
