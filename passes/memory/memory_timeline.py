"""Predicts the bytes that a step holds over time, for the memory line of a schedule's picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

from embrace_fx.passes.node_cost import NodeMs
from embrace_fx.passes.step_memory import StepMemory
from embrace_fx.vocabulary.operation_id import BESIDE, BETWEEN
from embrace_fx.vocabulary.schedule import MemoryAt, Span, Timeline


def memory_line(predicted: Timeline, memory: StepMemory, node_ms: NodeMs) -> tuple[MemoryAt, ...]:
    """Returns how many bytes a rank is predicted to hold at each time of a predicted timeline.

    The nodes of a phase are spread over the phase's compute spans, one after the other, each for its share of the time.
    The held bytes do not change while compute waits.

    Args:
        memory: the bytes that the step holds at each node.
        node_ms: function that returns the milliseconds of a node.
    """
    backward, forward = slice(memory.backward, None), slice(0, memory.backward)
    points: list[MemoryAt] = []
    for window in sorted({span.window for span in predicted.spans}):
        compute = sorted(
            (s for s in predicted.spans if s.window == window and s.operation.is_compute), key=lambda s: s.start_ms
        )
        cuts = [k for k, s in enumerate(compute) if s.operation.id in (BETWEEN, *BESIDE)] or [len(compute)]
        for spans, part in ((compute[: cuts[0]], backward), (compute[cuts[-1] + 1 :], forward)):
            times = _start_times(spans, [node_ms(node) for node in memory.nodes[part]])
            points += [MemoryAt(0, at, nbytes) for at, nbytes in zip(times, memory.bytes_at_node[part], strict=False)]
    return tuple(next(same) for _, same in groupby(points, key=lambda point: point.held_bytes))


def _start_times(spans: Sequence[Span], durations_ms: Sequence[float]) -> Iterator[float]:
    """Yields the start time of each node in milliseconds, if the nodes share the time of `spans` in proportion to
    `durations_ms`.
    """
    total, offered = sum(durations_ms), sum(s.end_ms - s.start_ms for s in spans)
    if not spans:
        return
    k, passed = 0, 0.0
    for done in accumulate(durations_ms[:-1], initial=0.0):
        at = done * offered / total if total else 0.0
        while k < len(spans) - 1 and passed + spans[k].end_ms - spans[k].start_ms <= at:
            passed += spans[k].end_ms - spans[k].start_ms
            k += 1
        yield spans[k].start_ms + at - passed
