"""The step as data, and the figures of a timeline, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embrace_fx.vocabulary.operation_id import Kind, Lane
from embrace_fx.vocabulary.schedule import (
    Dependence,
    Diagnostics,
    Operation,
    Schedule,
    Span,
    StepGraph,
    Timeline,
    Wait,
    diagnose,
)

BACKWARD = Operation("backward", "backward", "compute", 4.0)
REDUCE = Operation("bucket 0 [0]", "all_reduce", "dense", 3.0, sent_bytes=300, held_bytes=100)
LOOKUPS = Operation("lookups", "lookups", "embedding", 1.0, sent_bytes=50, held_bytes=70)
FORWARD = Operation("forward", "forward", "compute", 2.0)
STEPS = StepGraph(
    (BACKWARD, REDUCE, LOOKUPS, FORWARD),
    (
        Dependence("backward", "bucket 0 [0]"),
        Dependence("bucket 0 [0]", "forward"),
        Dependence("lookups", "forward"),
        Dependence("lookups", "backward", distance=1),
    ),
    ("backward", "forward"),
)


def two_windows(rank: int = 0, late_ms: float = 0.0) -> tuple[tuple[Span, ...], tuple[Wait, ...]]:
    """
    compute  backward  .  .  .  forward  backward ...
    link     lookups   reduce            lookups
    """
    spans, waits = [], []
    for window in (0, 1):
        at = window * 9.0
        spans += [
            Span(BACKWARD, window, rank, at, at + 4.0),
            Span(LOOKUPS, window, rank, at, at + 1.0),
            Span(REDUCE, window, rank, at + 4.0, at + 7.0 + late_ms),
            Span(FORWARD, window, rank, at + 7.0 + late_ms, at + 9.0),
        ]
        waits.append(Wait(REDUCE.name, "dense", window, rank, at + 4.0, at + 7.0 + late_ms))
    return tuple(spans), tuple(waits)


def test_the_figures_of_one_rank() -> None:
    spans, waits = two_windows()
    assert diagnose(Timeline(spans, waits, world_size=1)) == Diagnostics(
        step_ms=9.0,
        compute_ms=6.0,
        exposed_ms={"ids": 0.0, "embedding": 0.0, "dense": 3.0, "delayed": 0.0},
        communication_ms={"ids": 0.0, "embedding": 1.0, "dense": 3.0, "delayed": 0.0},
        overlap_ratio=0.25,
        held_bytes=0,  # unknown without dependences
    )


def test_figures_are_medians_over_ranks_and_windows() -> None:
    ranks = [two_windows(rank, late_ms) for rank, late_ms in enumerate((0.0, 0.5, 1.5))]
    shown = Timeline(tuple(s for spans, _ in ranks for s in spans), tuple(w for _, waits in ranks for w in waits), 3)
    found = diagnose(shown)
    assert (found.step_ms, found.compute_ms) == (9.0, 5.5)
    assert found.exposed_ms["dense"] == found.communication_ms["dense"] == 3.5
    shares = {share: round(ms, 3) for share, ms in found.shares_ms.items() if ms}
    assert shares == {"forward": 1.333, "backward": 4.0, "dense": 3.667}


def test_what_is_neither_compute_nor_a_wait_is_between_in_the_window_of_median_length() -> None:
    spans = [Span(BACKWARD, window, 0, at, at + 4.0) for window, at in enumerate((0.0, 5.0, 25.0, 32.0, 42.0))]
    assert diagnose(Timeline(tuple(spans), (), 1)).shares_ms["between"] == 3.0  # 5, 20, 7 and 10 ms


@pytest.mark.parametrize(
    ("exposed_ms", "expected"), [(0.0, 1.0), (1.0, 0.75), (9.0, 0.0)], ids=["hidden", "partly", "longer than its own"]
)
def test_what_compute_hides_of_the_communication(exposed_ms: float, expected: float) -> None:
    spans, _ = two_windows()
    waits = tuple(Wait("bucket 0 [0]", "dense", window, 0, 4.0, 4.0 + exposed_ms) for window in (0, 1))
    assert diagnose(Timeline(spans, waits, 1)).overlap_ratio == expected


def test_without_communication_all_of_it_is_hidden() -> None:
    found = diagnose(Timeline((Span(BACKWARD, 0, 0, 1.0, 5.0),), (), 1))
    assert (found.overlap_ratio, found.step_ms, found.compute_ms) == (1.0, 4.0, 4.0)


def test_a_window_without_compute_counts_for_nothing() -> None:
    """The earlier window has only a delayed exchange, and must not change the diagnosis."""
    spans, waits = two_windows()
    earlier = Span(replace(LOOKUPS, lane="delayed", kind="delayed"), -1, 0, 0.0, 2.0)
    assert diagnose(Timeline((earlier, *spans), waits, 1)) == diagnose(Timeline(spans, waits, 1))


def test_memory_is_held_from_the_end_until_the_last_reader_ended() -> None:
    """lookups 1..13 and 10..18, reduced bucket 7..9 and 16..18: both lookups from 10 to 13, with the bucket from 16."""
    spans, waits = two_windows()
    assert diagnose(Timeline(spans, waits, 1, STEPS.dependences)).held_bytes == 100 + 70
    assert diagnose(Timeline(spans[:4], waits[:1], 1, STEPS.dependences[:2])).held_bytes == 100
    # With a later second backward, lookups are in memory from 1 to 17 ms.
    late = tuple(replace(s, end_ms=s.end_ms + 4.0) if (s.operation, s.window) == (BACKWARD, 1) else s for s in spans)
    assert diagnose(Timeline(late, waits, 1, STEPS.dependences)).held_bytes == 100 + 70 + 70


def test_what_the_first_operation_holds_counts() -> None:
    first = Span(LOOKUPS, 0, 0, 0.0, 1.0)
    assert diagnose(Timeline((first, Span(FORWARD, 0, 0, 1.0, 3.0)), (), 1, STEPS.dependences)).held_bytes == 70


def test_what_is_freed_at_a_moment_makes_room_for_what_is_kept_from_then_on() -> None:
    lanes: tuple[tuple[str, Kind, Lane], ...] = (("a", "gradients", "embedding"), ("b", "lookups", "embedding"))
    operations = [Operation(name, kind, lane, 1.0, held_bytes=10) for name, kind, lane in lanes]
    last = Operation("c", "forward", "compute", 1.0)
    spans = tuple(Span(o, 0, 0, float(k), k + 1.0) for k, o in enumerate((*operations, last)))
    shown = Timeline(spans, (), 1, (Dependence("a", "b"), Dependence("b", "c")))
    assert diagnose(shown).held_bytes == 10


def test_schedules_that_launch_alike_have_one_digest() -> None:
    spans, waits = two_windows()
    one = Schedule("2d", ("lookups", "bucket 0 [0]"), STEPS, Timeline(spans, waits, 1))
    assert one.digest() == replace(one, source="profile", predicted=Timeline((), (), 1)).digest()
    assert one.digest() != replace(one, launch_order=one.launch_order[::-1]).digest()
    assert one.digest() != replace(one, name="horizontal").digest()
