"""Places offloads and reloads in a step: where compute hides them, or closer together if the memory limit requires
it.

An offload starts after the node that computes its value. It is awaited where it should have ended; if that would hold
too much, earlier, down to the value's last reader. A reload starts early enough to end before its reader; if that would
hold too much, later, up to right before it. Each lane copies one value at a time. The remaining wait time is added to
the step's time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embrace_fx.passes.step_memory import Storage


@dataclass(frozen=True)
class CopyRate:
    """The speed of copies between a device and its host, or between the CPU and a file.

    Attributes:
        bytes_per_ms: the speed in each direction; 0 if nothing can be copied.
        start_ms: the fixed time of each copy, independent of its size.
        share: how much a copy slows down concurrent compute on the same cores, as a fraction of the copy's time.
    """

    bytes_per_ms: float = 0.0
    start_ms: float = 0.0
    share: float = 0.0

    def ms(self, nbytes: int) -> float:
        """Returns the milliseconds of copying `nbytes` in one direction."""
        return self.start_ms + nbytes / self.bytes_per_ms


NO_COPIES = CopyRate()
"""Nothing is copied."""


@dataclass
class PlacedCopy:
    """Where one storage is offloaded and reloaded, as positions of the nodes before which the copies are inserted.

    Attributes:
        left: the position at which the step waits for the end of the offload. The first position of the backward means
            the end of the forward.
        comes: the position at which the reload starts.
    """

    storage: Storage
    left: int
    comes: int

    @property
    def reload_awaited_at(self) -> int:
        """The position of the node before which the step waits for the reload."""
        assert self.storage.first_backward is not None
        return self.storage.first_backward


@dataclass(frozen=True)
class Placement:
    """Where all offloads and reloads of a step are placed, with the memory and time that result.

    Attributes:
        copies: where each storage is offloaded and reloaded.
        peak_bytes: the maximum bytes that the step then holds.
        added_ms: the time that the copies add to the step.
    """

    copies: tuple[PlacedCopy, ...]
    peak_bytes: int
    added_ms: float


def place_copies(
    storages: Sequence[Storage],
    by_time: Sequence[int],
    starts_ms: Sequence[float],
    backward: int,
    limit: int,
    rate: CopyRate,
) -> Placement:
    """Places the offloads and reloads of saved storages so that the step holds at most `limit` bytes, if possible.
    Returns their places, with the resulting peak memory and added time.

    Args:
        by_time: the bytes held while each node runs, if nothing is offloaded.
        starts_ms: the start time of each node, followed by the end of the last node.
        backward: the position of the first node of the backward.
        rate: the speed of the copies.
    """
    held = np.array(by_time, dtype=np.int64)
    copies = _place_hidden(storages, starts_ms, backward, rate)
    for copy in copies:
        held[copy.left : copy.comes] -= copy.storage.nbytes
    while held.max(initial=0) > limit:
        if not _move_copy_closer(copies, held, int(held.argmax()), backward):
            break
    return Placement(tuple(copies), int(held.max(initial=0)), _added_ms(copies, starts_ms, rate))


def _place_hidden(
    storages: Sequence[Storage], starts_ms: Sequence[float], backward: int, rate: CopyRate
) -> list[PlacedCopy]:
    """Places the wait for each offload as early, and the start of each reload as late, as compute can hide the copies.

    Args:
        starts_ms: the start time of each node, followed by the end of the last node.
        backward: the position of the first node of the backward.
        rate: the speed of the copies.
    """
    lane_ms = 0.0
    copies = []
    for storage in sorted(storages, key=lambda s: s.born):
        lane_ms = max(lane_ms, starts_ms[storage.born + 1]) + rate.ms(storage.nbytes)
        left = bisect_left(starts_ms, lane_ms, storage.last_forward + 1, backward)
        copies.append(PlacedCopy(storage, min(left, backward), backward))
    lane_ms = starts_ms[-1]
    for copy in sorted(copies, key=lambda c: (c.reload_awaited_at, c.storage.born), reverse=True):
        lane_ms = min(lane_ms, starts_ms[copy.reload_awaited_at]) - rate.ms(copy.storage.nbytes)
        copy.comes = max(bisect_right(starts_ms, lane_ms, backward, copy.reload_awaited_at + 1) - 1, backward)
    return copies


def _move_copy_closer(
    copies: Sequence[PlacedCopy], held: np.ndarray[tuple[int], np.dtype[np.int64]], peak: int, backward: int
) -> bool:
    """Moves the end of one offload earlier, or the start of one reload later, to reduce the peak. Changes `copies` and
    `held` in place. Returns False if no move reduces the peak.

    Args:
        held: the bytes held at each node, with the copies as placed now.
        peak: the position of the node at which most bytes are held.
        backward: the position of the backward's first node.
    """
    if peak < backward:
        late = [c for c in copies if c.storage.last_forward < peak < c.left]
        if late:
            copy = min(late, key=lambda c: (c.storage.born, c.left))  # the copy whose offload started first
            held[peak : copy.left] -= copy.storage.nbytes
            copy.left = peak
        return bool(late)
    early = [c for c in copies if c.comes <= peak < c.reload_awaited_at]
    if early:
        copy = max(early, key=lambda c: (c.reload_awaited_at, c.storage.born))  # the copy whose reader is last
        held[copy.comes : peak + 1] -= copy.storage.nbytes
        copy.comes = peak + 1
    return bool(early)


def _added_ms(copies: Sequence[PlacedCopy], starts_ms: Sequence[float], rate: CopyRate) -> float:
    """Returns the milliseconds that copies add to a step: the time that the step waits for them, and the compute time
    that they take on shared cores.

    Args:
        starts_ms: the start time of each node, followed by the end of the last node.
    """
    events: list[tuple[int, int, int]] = []  # (position, kind of event, index of the copy)
    for k, copy in enumerate(copies):
        events += [(copy.storage.born + 1, 0, k), (copy.left, 1, k), (copy.comes, 2, k), (copy.reload_awaited_at, 3, k)]
    lanes = {0: 0.0, 2: 0.0}
    ends: dict[tuple[int, int], float] = {}
    waited = 0.0
    for position, what, k in sorted(events):
        now = starts_ms[position] + waited
        if what in lanes:
            lanes[what] = ends[what, k] = max(lanes[what], now) + rate.ms(copies[k].storage.nbytes)
        else:
            waited += max(ends[what - 1, k] - now, 0.0)
    return waited + rate.share * sum(2 * rate.ms(copy.storage.nbytes) for copy in copies)
