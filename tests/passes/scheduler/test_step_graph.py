"""A window as operations and dependences, read from the graphs that run; and the story that becomes of it."""

from __future__ import annotations

import pytest

from embrace_fx.cost import links as cost
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.vocabulary.operation_id import BETWEEN, EARLY, END, START, OperationId, compute_id, gradients_id
from embrace_fx.vocabulary.schedule import SCHEDULES, StepGraph
from tests.support.golden import check_golden
from tests.support.translators import BATCH, CHUNK, DIM, LENGTH, TABLES, steps_of_translator
from tests.support.windows import check_order, story


def before(steps: StepGraph, after: str | OperationId, distance: int = 0) -> set[str]:
    return {d.before for d in steps.dependences if d.after == str(after) and d.distance == distance}


def chunks(*buckets: int, of: int = 2) -> set[str]:
    return {f"bucket {k} [{i}]" for k in buckets for i in range(of)}


BACKWARD = tuple(compute_id("backward", what) for what in ("bucket 0", TABLES[1], "bucket 1", "bucket 2", TABLES[0]))
ADVANCED = (*BACKWARD[:3], BACKWARD[4], BACKWARD[3])  # the first layer's weights have time, its table has not
HEAD = (*(compute_id("update", table) for table in TABLES), START)


def of_rows(table: str) -> tuple[OperationId, OperationId]:
    return compute_id("rows", table), compute_id("forward", table)


def of_bucket(k: int) -> tuple[OperationId, OperationId]:
    return compute_id("update", f"bucket {k}"), compute_id("forward", f"bucket {k}")


def test_compute_is_cut_where_it_meets_communication() -> None:
    blocks = (*of_rows(TABLES[0]), *of_bucket(2), *of_bucket(1), *of_rows(TABLES[1]), *of_bucket(0))
    rows = (*of_rows(TABLES[0]), *of_rows(TABLES[1]))
    for name in SCHEDULES:
        backward = (EARLY, *(BACKWARD if name == "none" else ADVANCED), END, BETWEEN)
        expected = (*backward, *HEAD, *(blocks if name in ("horizontal", "2d") else rows))
        steps = steps_of_translator(name)
        assert steps.compute_order == tuple(map(str, expected)), name
        assert {o.name for o in steps.operations if not o.is_communication} == set(steps.compute_order)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_sent_leaves_where_it_is_made_and_is_there_where_it_is_read(name: str) -> None:
    steps = steps_of_translator(name)
    for k in range(3):
        for chunk in chunks(k, of=1 if name == "none" else 2):
            assert before(steps, chunk) == {f"backward bucket {k}"}
    for table in TABLES:
        gradients = f"{table} {'prior' if name in ('vertical', '2d') else 'gradients'}"
        assert before(steps, gradients) == {f"backward {table}"}
        assert before(steps, f"{table} rows") == {f"update {table}"}
        assert f"{table} rows" in before(steps, f"rows {table}")
    assert before(steps, "ids") == {str(BETWEEN)}


def test_none_ends_every_exchange_within_the_backward() -> None:
    steps = steps_of_translator("none")
    assert before(steps, END) == {*chunks(0, 1, 2, of=1), *(f"{table} gradients" for table in TABLES)}
    assert before(steps, f"update {TABLES[0]}") == {"ids"}
    assert all(d.distance == 0 for d in steps.dependences)
    assert {o.lane for o in steps.communications} == {"ids", "embedding", "dense"}


def test_horizontal_waits_for_a_bucket_before_the_forward_that_reads_it() -> None:
    steps = steps_of_translator("horizontal")
    assert before(steps, END) == before(steps, BETWEEN) == set()
    assert before(steps, "update bucket 1") == chunks(1)
    assert before(steps, f"update {TABLES[0]}") == {f"{TABLES[0]} gradients", "ids"}
    assert not any(o.id is None or o.id.part in ("early", "delayed") for o in steps.communications)


@pytest.mark.parametrize("name", ["vertical", "2d"])
def test_vertical_cuts_rows_in_two(name: str) -> None:
    steps = steps_of_translator(name)
    for table in TABLES:
        assert before(steps, f"{table} early rows") == {str(EARLY)}
        assert before(steps, f"update {table}") == {f"{table} prior"}
        assert before(steps, f"rows {table}") == {f"{table} rows", f"{table} early rows"}
        for chunk in (f"{table} delayed [0]", f"{table} delayed [1]"):
            assert before(steps, chunk) == {f"backward {table}"}
            assert chunk in before(steps, EARLY, distance=1)
    assert "ids" in before(steps, EARLY, distance=1)
    assert before(steps, END) == (set() if name == "2d" else chunks(0, 1, 2))
    assert before(steps, f"update {'bucket 0'}") == (chunks(0) if name == "2d" else set())


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
