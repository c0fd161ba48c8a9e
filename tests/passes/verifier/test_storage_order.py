"""Schedules of rows beyond memory: legal ones, and what is wrong with their illegal twins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embrace_fx.cost.storage import Draws, RowMemory, StorageTier
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.scheduler.storage_lane import add_storage_operations, set_read_ahead, with_measured_speed
from embrace_fx.passes.verifier.storage_order import check_storage
from embrace_fx.vocabulary.operation_id import BETWEEN, EARLY, END, START, compute_id, rows_id, storage_id
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph

UPDATE, ROWS = compute_id("update", "t"), compute_id("rows", "t")
SENT = {rows_id("t", "early"): EARLY, rows_id("t", "late"): UPDATE}
COMPUTE = (EARLY, END, BETWEEN, START, UPDATE, ROWS)
STEPS = StepGraph(
    tuple(
        [Operation.from_id(each, 1.0) for each in COMPUTE]
        + [Operation.from_id(each, 0.1, 100, ("t",)) for each in SENT]
    ),
    tuple(
        [Dependence(str(block), str(sent)) for sent, block in SENT.items()]
        + [Dependence(str(sent), str(ROWS), int(sent.part == "early")) for sent in SENT]
    ),
    tuple(map(str, COMPUTE)),
)
MEMORY = RowMemory(1000, 300, 100.0, 4.0, 0, 64, 100, Draws(1000, 0.0, 105.0), (StorageTier("file", 0.02, 0.02),))


def drop(steps: StepGraph, before: str, after: str) -> StepGraph:
    kept = tuple(d for d in steps.dependences if (d.before, d.after) != (before, after))
    assert len(kept) < len(steps.dependences)
    return replace(steps, dependences=kept)


def planned(batches: int, memory: RowMemory = MEMORY) -> tuple[StepGraph, RowMemory]:
    of = set_read_ahead(memory, batches, 2)
    return add_storage_operations(STEPS, {"t": of}), of


@pytest.mark.parametrize(
    ("batches", "slots", "ahead"), [(0, 300, 0), (1, 300, 0), (3, 300, 2), (9, 300, 2), (3, 200, 1), (3, 199, 0)]
)
def test_as_many_steps_are_read_ahead_as_slots_have_room_for(batches: int, slots: int, ahead: int) -> None:
    steps, of = planned(batches, replace(MEMORY, slots=slots))
    assert of.ahead == ahead
    check_storage(steps, {"t": of})


def test_reads_ahead_are_beside_compute_and_others_stand_in_its_way() -> None:
    ahead, at_once = (schedule(planned(batches)[0], "2d").diagnostics() for batches in (3, 1))
    assert ahead.exposed_ms["storage"] == 0.0
    assert at_once.exposed_ms["storage"] >= MEMORY.read_ms
    assert at_once.step_ms == pytest.approx(ahead.step_ms + at_once.exposed_ms["storage"])
    assert ahead.communication_ms["storage"] == pytest.approx(MEMORY.read_ms + MEMORY.write_ms)


def test_a_lane_that_is_slower_than_compute_sets_the_pace() -> None:
    slow = replace(MEMORY, storage=(StorageTier("file", 0.2, 0.2),))
    found = schedule(planned(9, slow)[0], "2d").diagnostics()
    assert found.step_ms == pytest.approx(slow.read_ms + slow.write_ms, rel=0.01)


def test_rows_move_at_the_pace_that_was_measured() -> None:
    found = with_measured_speed("t", MEMORY, {storage_id("read", "t"): 0.001})
    assert found.read_ms == pytest.approx(MEMORY.moved_bytes * 0.001)
    assert found.write_ms == MEMORY.write_ms, "none was written"


def test_rows_looked_up_before_they_are_read_are_refused() -> None:
    steps, of = planned(3)
    with pytest.raises(ValueError, match="'read t' does not precede 'early rows'"):
        check_storage(drop(steps, "read t", str(EARLY)), {"t": of})
    with pytest.raises(ValueError, match="'read t' does not precede 'early rows'"):
        check_storage(STEPS, {"t": of})


def test_rows_written_before_their_slots_are_taken_are_refused() -> None:
    steps, of = planned(3)
    with pytest.raises(ValueError, match="'write t' does not follow 'update t'"):
        check_storage(drop(steps, "update t", "write t"), {"t": of})


def test_rows_that_would_leave_before_their_step_are_refused() -> None:
    steps, of = planned(3)
    with pytest.raises(ValueError, match="slots for 299 rows of t, but 3 steps of up to 100 rows"):
        check_storage(steps, {"t": replace(of, slots=299)})
