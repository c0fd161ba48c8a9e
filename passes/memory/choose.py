"""Chooses which values a forward keeps, offloads or recomputes to stay within a budget (DELTA).

The forward is cut into segments, each recomputed as one piece, at places where few bytes are live. Storages are evicted
one by one in one of two orders, DELTA's filter and its knapsack (arXiv 2203.15980, and TACO 2024), and the others are
kept. An evicted storage is recomputed, or offloaded and reloaded, whichever costs less. The choice with the least
predicted time wins. This module only decides; `Memory` applies the choice.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

import numpy as np
from torch import fx

from embrace_fx.passes.memory.copy_placement import NO_COPIES, CopyRate
from embrace_fx.passes.memory.offload import offloadable_values
from embrace_fx.passes.node_cost import NodeMs
from embrace_fx.passes.step_memory import StepMemory, Storage

SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of segments to try."""

SEGMENTS_WITH_COPIES = (1, 2, 4, 8, 16, 32)
"""Numbers of segments to try if values may be offloaded: fewer, because copies take longer to simulate."""

NEVER = -1
"""The segment of a node that cannot be recomputed."""


@dataclass(frozen=True)
class TimedStep:
    """The memory that a training step holds at each node of its graph, and the time that each node takes.

    Attributes:
        memory: the bytes that the step holds at each node.
        node_ms: function that returns the milliseconds of a node.
        copies: the speed of offloads to the host or a file, and of reloads.
    """

    memory: StepMemory
    node_ms: NodeMs
    copies: CopyRate = NO_COPIES

    @cached_property
    def ms(self) -> list[float]:
        """The estimated milliseconds of each node of the step, in execution order."""
        return [self.node_ms(node) for node in self.memory.nodes]

    @cached_property
    def starts_ms(self) -> list[float]:
        """The start time of each node of the step in milliseconds, followed by the end of the last node."""
        return list(accumulate(self.ms, initial=0.0))

    def unread_ms(self, storage: Storage) -> float:
        """Returns the milliseconds between a storage's last read in the forward and its first read in the backward."""
        return self.starts_ms[storage.first_backward or 0] - self.starts_ms[storage.last_forward + 1]

    def nodes_of_storage(self, storage: Storage) -> list[int]:
        """Returns the positions, in execution order, of the nodes whose values use a storage."""
        return [self.memory.position[node] for node in storage.names]


@dataclass(frozen=True)
class Choice:
    """A decision, for each value that the backward reads, whether to save, offload or recompute it.

    Attributes:
        segment: for each node of the forward, the number of its segment (nodes that are recomputed together), or
            `NEVER` if it is not recomputed.
        kept: positions of nodes that are saved although the other nodes of their segment are recomputed.
        offloaded: storages that are copied to the host or a file until the backward.
    """

    segment: Sequence[int]
    kept: frozenset[int] = frozenset()
    offloaded: tuple[Storage, ...] = ()


@dataclass(frozen=True)
class Evicted:
    """A storage that the step does not keep between forward and backward, because it is offloaded or recomputed.

    Attributes:
        names: positions of the nodes that run again to recompute the storage, or None if it is offloaded.
    """

    storage: Storage
    names: frozenset[int] | None


@dataclass(frozen=True)
class EvictionSequence:
    """A sequence of choices, each of which evicts (offloads or recomputes) one more storage than the previous one.

    Attributes:
        segment: for each node of the forward, the number of its segment (nodes that are recomputed together), or
            `NEVER` if it is not recomputed.
        kept: positions of the nodes that are saved if nothing is evicted.
        evicted: the storages, in the order in which they are evicted.
    """

    segment: Sequence[int]
    kept: frozenset[int]
    evicted: Sequence[Evicted]

    def __len__(self) -> int:
        return len(self.evicted)

    def first(self, count: int) -> Choice:
        """Returns the choice that evicts the first `count` storages of the sequence."""
        return self.choice(self.evicted[:count])

    def choice(self, evicted: Sequence[Evicted]) -> Choice:
        """Returns the choice that evicts exactly the storages `evicted`."""
        again = frozenset[int]().union(*(each.names for each in evicted if each.names is not None))
        return Choice(self.segment, self.kept - again, tuple(each.storage for each in evicted if each.names is None))


def eviction_sequences(step: TimedStep, can_recompute: Callable[[fx.Node], bool]) -> Iterator[EvictionSequence]:
    """Yields candidate sequences of saved values to evict (offload or recompute). They differ in the order of the
    values, in the number of segments into which the forward is cut for recomputation, and in whether values are
    offloaded.

    Args:
        step: the nodes, memory and times of the step.
        can_recompute: returns whether a node may run again in the backward.
    """
    held = step.memory
    candidates = _worth_deciding(held)
    if not candidates:
        return
    able = [can_recompute(node) for node in held.nodes[: held.backward]]
    cut = _SegmentCutter(held, able)
    can_leave = offloadable_values(held) if step.copies.bytes_per_ms else {}
    copied = {storage for storage in candidates if storage in can_leave}
    yield from _in_both_orders(step, candidates, able, set(), cut, SEGMENTS)
    if copied:
        yield from _in_both_orders(step, candidates, able, copied, cut, SEGMENTS_WITH_COPIES)
        yield from _in_both_orders(step, candidates, [False] * len(able), copied, cut, (0,))


def _in_both_orders(
    step: TimedStep,
    candidates: Sequence[Storage],
    recomputable: Sequence[bool],
    copied: Set[Storage],
    cutter: _SegmentCutter,
    counts: Sequence[int],
) -> Iterator[EvictionSequence]:
    """Yields sequences that evict storages in DELTA's filter order (by bytes and unread time), and in knapsack order
    (by cost per byte), each for several numbers of segments.

    Args:
        step: the nodes, memory and times of the step.
        candidates: the storages that may be evicted.
        recomputable: for each node of the forward, whether it may run again.
        copied: the storages that may be offloaded.
        cutter: cuts the forward into segments, which are recomputed one at a time.
        counts: the numbers of segments; 0 to recompute nothing.
    """
    found = [s for s in candidates if recomputable[s.born] or s in copied]
    orders = _filter_order(step, found), _knapsack_order(step, found, recomputable, copied)
    for count in counts:
        segment = cutter.segments(count) if count else [NEVER] * len(recomputable)
        for order in orders:
            yield _build_sequence(step, segment, order, copied)


def _worth_deciding(memory: StepMemory) -> list[Storage]:
    """Returns the saved storages of a step whose size is at least 1 % of their mean size."""
    saved = memory.saved
    mean = memory.saved_bytes / max(len(saved), 1)
    return [storage for storage in saved if storage.nbytes >= 0.01 * mean]


class _SegmentCutter:
    """Cuts a forward into segments that save about the same number of bytes, at positions that few live bytes cross.

    Args:
        held: the bytes that the step holds at each node.
        able: for each node of the forward, whether it may run again.
    """

    def __init__(self, held: StepMemory, able: Sequence[bool]) -> None:
        self._able = able
        crossing, saved = [0] * (len(able) + 2), [0] * len(able)
        for storage in held.storages:
            if storage.born < held.backward:
                crossing[storage.born + 1] += storage.nbytes
                crossing[min(storage.last_forward, len(able)) + 1] -= storage.nbytes
                if storage.first_backward is not None:
                    saved[storage.born] += storage.nbytes
        self._crossing = list(accumulate(crossing))
        self._saved = list(accumulate(saved, initial=0))

    def segments(self, count: int) -> list[int]:
        """Cuts the forward into `count` segments. Returns the segment number of each node, or `NEVER` for a node that
        may not run again.
        """
        cuts = [self._best_position(k / count, 0.5 / count) for k in range(1, count)]
        number, found = 0, []
        for position, able in enumerate(self._able):
            number += cuts.count(position)
            found.append(number if able else NEVER)
        return found

    def _best_position(self, share: float, tolerance: float) -> int:
        """Returns the position of the node before which to cut: few live bytes cross the cut, and about the fraction
        `share` of all saved bytes is saved before it.

        Args:
            tolerance: how far the fraction of saved bytes may be from `share`.
        """
        total = self._saved[-1]
        first = bisect_left(self._saved, (share - tolerance) * total)
        last = bisect_right(self._saved, (share + tolerance) * total, first)
        near = range(first, min(last, len(self._able))) or [bisect_left(self._saved, share * total)]
        return min(near, key=lambda p: (self._crossing[p], abs(self._saved[p] - total * share)))


def _filter_order(step: TimedStep, candidates: Sequence[Storage]) -> list[Storage]:
    """Returns the storages `candidates` of a step in the order in which DELTA's filter evicts them. The filter
    repeatedly evicts one of the storages that are in memory at the peak: the storage with the largest product of bytes
    and unread time.
    """
    held = np.array(step.memory.bytes_at_node, dtype=np.int64)
    begin = np.array([s.last_forward for s in candidates], dtype=np.int64)
    end = np.array([s.first_backward or 0 for s in candidates], dtype=np.int64)
    starts_ms = np.array(step.starts_ms)
    score = np.array([s.nbytes for s in candidates], dtype=np.int64) * (starts_ms[end] - starts_ms[begin])
    order: list[Storage] = []
    while (score >= 0).any():
        peak = held.argmax()
        there = np.where((begin < peak) & (peak < end), score, -1.0)
        chosen = int((there if there.max() >= 0 else score).argmax())
        held[begin[chosen] + 1 : end[chosen]] -= candidates[chosen].nbytes
        score[chosen] = -1.0
        order.append(candidates[chosen])
    return order


def _knapsack_order(
    step: TimedStep, candidates: Sequence[Storage], recomputable: Sequence[bool], copied: Set[Storage]
) -> list[Storage]:
    """Returns storages sorted by the time per byte that evicting (offloading or recomputing) them costs, cheapest
    first.

    Args:
        recomputable: for each node of the forward, whether it may run again.
        copied: the storages that may be offloaded.
    """
    segment = [0 if each else NEVER for each in recomputable]
    saved = {name for storage in step.memory.saved for name in step.nodes_of_storage(storage)}

    def least_ms(storage: Storage) -> float:
        """Returns the milliseconds that evicting a storage adds to the step: the shorter time of offloading and of
        recomputation.
        """
        copied_ms = _offload_ms(step, storage, step.unread_ms(storage)) if storage in copied else inf
        return min(copied_ms, _recompute_ms(step, storage, saved, segment, copied_ms))

    return sorted(candidates, key=lambda s: least_ms(s) / s.nbytes)


def _offload_ms(step: TimedStep, storage: Storage, idle_ms: float) -> float:
    """Returns the milliseconds that offloading and reloading a storage adds to a step, if compute can hide `idle_ms` of
    the copies.
    """
    both_ms = 2 * step.copies.ms(storage.nbytes)
    return max(0.0, both_ms - idle_ms) + step.copies.share * both_ms


def _recompute_ms(step: TimedStep, storage: Storage, saved: Set[int], segment: Sequence[int], most_ms: float) -> float:
    """Returns the milliseconds to recompute a storage from saved values. Returns infinity if it cannot be recomputed,
    and some time above `most_ms` if recomputation takes longer than `most_ms`.

    Args:
        saved: the positions of the nodes whose values are saved.
        segment: for each node of the forward, its segment, or `NEVER` if it cannot be recomputed.
    """
    total, seen, waiting = 0.0, set(), [storage.born]
    if segment[waiting[0]] == NEVER:
        return inf
    while waiting and total <= most_ms:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            total += step.ms[node]
            waiting += [value for value in step.memory.inputs[node] if segment[value] != NEVER and value not in saved]
    return total


def _build_sequence(
    step: TimedStep, segment: Sequence[int], order: Sequence[Storage], copied: Set[Storage]
) -> EvictionSequence:
    """Returns the sequence that evicts storages in the given order. A storage in `copied` is offloaded if this is
    faster than to recompute it. All other storages are recomputed.

    Args:
        step: the nodes, memory and times of the step.
        segment: for each node of the forward, its segment, or `NEVER` if it cannot be recomputed.
    """
    across = _read_from_other_segments(step, segment)
    saved = {name for storage in step.memory.saved for name in step.nodes_of_storage(storage)}
    kept = frozenset(saved | across)
    busy_ms = 0.0
    evicted = []
    for storage in order:
        maker = storage.born
        runs_again = segment[maker] != NEVER and maker not in across
        if storage in copied:
            copied_ms = _offload_ms(step, storage, step.unread_ms(storage) - busy_ms)
            if not runs_again or copied_ms < _recompute_ms(step, storage, saved, segment, copied_ms):
                busy_ms += 2 * step.copies.ms(storage.nbytes)
                evicted.append(Evicted(storage, None))
                continue
        names = step.nodes_of_storage(storage)
        saved.difference_update(names)
        evicted.append(Evicted(storage, frozenset(names) - across))
    return EvictionSequence(segment, kept, evicted)


def _read_from_other_segments(step: TimedStep, segment: Sequence[int]) -> set[int]:
    """Returns the positions of nodes whose values another segment reads. These values are saved, because recomputation
    starts from them.

    Args:
        segment: for each node of the forward, its segment, or `NEVER` if it cannot be recomputed.
    """
    return {
        value
        for node, own in enumerate(segment)
        if own != NEVER
        for value in step.memory.inputs[node]
        if segment[value] != own
    }
