"""What of a forward is kept, offloaded or computed again so that a step stays within a budget (DELTA).

The forward is cut into segments, each to run again as one piece, at places where little is in use. Of what a segment
would save, some storages are kept all the same: which, is the question. Two orders in which storages are given up
answer it, DELTA's filter and its knapsack (arXiv 2203.15980, and TACO 2024). A storage that is given up is computed
again, or copied out and back, whichever costs less. The answer with the least time, as predicted, is taken. Deciding
changes nothing: `Memory` applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate

from torch import fx

from embrace_fx.passes.memory.held import Held, Storage
from embrace_fx.passes.memory.offload import values_that_leave
from embrace_fx.passes.memory.place import NO_COPIES, CopyRate

SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Into how many pieces a forward is cut: all are tried."""

SEGMENTS_WITH_COPIES = (1, 2, 4, 8, 16, 32)
"""Where values may be offloaded, too: fewer, for each is tried with offloading and without."""


@dataclass(frozen=True)
class Choice:
    """What to do with a step's saved values.

    Attributes:
        segment: node -> the segment that computes it again.
        kept: nodes that are saved although their segment runs again.
        offloaded: storages that leave for the host, or a file, until the backward.
    """

    segment: Mapping[fx.Node, int] = field(default_factory=dict)
    kept: frozenset[fx.Node] = frozenset()
    offloaded: tuple[Storage, ...] = ()


@dataclass(frozen=True)
class Costs:
    """Times, as far as deciding needs them.

    Attributes:
        node_ms: of a node.
        copies: how fast values are offloaded and reloaded.
    """

    node_ms: Callable[[fx.Node], float]
    copies: CopyRate = NO_COPIES


def choices(held: Held, runs_again: Callable[[fx.Node], bool], costs: Costs) -> Iterator[list[Choice]]:
    """For each way of cutting the forward and each order: choices, each of which gives up more than the one before."""
    candidates = _candidates(held)
    if not candidates:
        return
    can_leave = values_that_leave(held) if costs.copies.bytes_per_ms else {}
    copied = {id(storage) for storage in candidates if id(storage) in can_leave}
    for count in SEGMENTS if not copied else SEGMENTS_WITH_COPIES:
        segment = _segments(held, count, runs_again)
        for order in (_filter_order, _knapsack_order):
            yield list(_giving_up(held, segment, order(held, candidates, segment, set(), costs), set(), costs))
    for count in (0, *SEGMENTS_WITH_COPIES) if copied else ():
        segment = _segments(held, count, runs_again) if count else {}
        for order in (_filter_order, _knapsack_order):
            yield list(_giving_up(held, segment, order(held, candidates, segment, copied, costs), copied, costs))


def _candidates(held: Held) -> list[Storage]:
    """Saved storages that are worth a decision: at least 1 % of the mean size."""
    saved = held.saved
    mean = held.saved_bytes / max(len(saved), 1)
    return [storage for storage in saved if storage.nbytes >= 0.01 * mean]


def _segments(held: Held, count: int, runs_again: Callable[[fx.Node], bool]) -> dict[fx.Node, int]:
    """Segment numbers of the forward's nodes, about even in what they save; cut where the least is in use."""
    nodes = held.nodes[: held.backward]
    crossing, saved = [0] * (len(nodes) + 1), [0] * (len(nodes) + 1)
    for storage in held.storages:
        if storage.born < held.backward:
            for position in range(storage.born + 1, min(storage.last_forward, len(nodes)) + 1):
                crossing[position] += storage.nbytes
            if storage.first_backward is not None:
                saved[storage.born] += storage.nbytes
    total, sums = sum(saved), [0]
    for size in saved:
        sums.append(sums[-1] + size)
    cuts = []
    for k in range(1, count):
        middle = next(p for p, so_far in enumerate(sums) if so_far >= total * k / count)
        near = [p for p in range(len(nodes)) if abs(sums[p] - total * k / count) <= total / (2 * count)] or [middle]
        cuts.append(min(near, key=lambda p: (crossing[p], abs(sums[p] - total * k / count))))
    segment: dict[fx.Node, int] = {}
    number = 0
    for position, node in enumerate(nodes):
        number += sum(cut == position for cut in cuts)
        if runs_again(node):
            segment[node] = number
    return segment


def _filter_order(
    held: Held, candidates: Sequence[Storage], segment: Mapping[fx.Node, int], copied: Set[int], costs: Costs
) -> list[Storage]:
    """The biggest and longest unused of those that are there at the peak, one after the other: argmax of m s."""
    by_time = list(held.by_time)
    started = [0.0]
    for node in held.nodes:
        started.append(started[-1] + costs.node_ms(node))
    left = [each for each in candidates if each.node in segment or id(each) in copied]
    order: list[Storage] = []
    while left:
        peak = max(range(len(by_time)), key=by_time.__getitem__)
        there = [s for s in left if s.last_forward < peak < (s.first_backward or 0)] or left
        chosen = max(there, key=lambda s: s.nbytes * (started[s.first_backward or 0] - started[s.last_forward]))
        for position in range(chosen.last_forward + 1, chosen.first_backward or 0):
            by_time[position] -= chosen.nbytes
        left.remove(chosen)
        order.append(chosen)
    return order


def _knapsack_order(
    held: Held, candidates: Sequence[Storage], segment: Mapping[fx.Node, int], copied: Set[int], costs: Costs
) -> list[Storage]:
    """By the time that giving them up costs for each byte, the least first: what is left to keep is worth the most."""
    saved = {name for storage in held.saved for name in storage.names}
    found = [each for each in candidates if each.node in segment or id(each) in copied]
    interval_ms = _intervals_ms(held, costs)

    def least_ms(storage: Storage) -> float:
        ways = [_again_ms(storage, saved, segment, costs)] if storage.node in segment else []
        ways += [_copied_ms(storage, interval_ms(storage), costs)] if id(storage) in copied else []
        return min(ways)

    return sorted(found, key=lambda s: least_ms(s) / s.nbytes)


def _intervals_ms(held: Held, costs: Costs) -> Callable[[Storage], float]:
    """How long a storage is not read between forward and backward."""
    started = list(accumulate(map(costs.node_ms, held.nodes), initial=0.0))
    return lambda storage: started[storage.first_backward or 0] - started[storage.last_forward + 1]


def _copied_ms(storage: Storage, idle_ms: float, costs: Costs) -> float:
    """What copying a storage out and back takes where the link is idle so long in between."""
    both_ms = 2 * costs.copies.ms(storage.nbytes)
    return max(0.0, both_ms - idle_ms) + costs.copies.share * both_ms


def _again_ms(storage: Storage, saved: set[fx.Node], segment: Mapping[fx.Node, int], costs: Costs) -> float:
    """What computing a storage again takes, from what is saved besides."""
    total, seen, waiting = 0.0, set(), [storage.node]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        total += costs.node_ms(node)
        waiting += [value for value in node.all_input_nodes if value in segment and value not in saved]
    return total


def _giving_up(
    held: Held, segment: Mapping[fx.Node, int], order: Sequence[Storage], copied: Set[int], costs: Costs
) -> Iterator[Choice]:
    """Choices that give up one storage of `order` after the other: computed again, or, of those in `copied`, offloaded,
    whichever costs less."""
    across = _read_across(held, segment)
    of_candidates = {name for storage in order for name in storage.names}
    kept = {name for storage in held.saved for name in storage.names if name not in of_candidates} | across
    kept |= of_candidates
    interval_ms, busy_ms = _intervals_ms(held, costs), 0.0
    saved = {name for storage in held.saved for name in storage.names} if copied else set()
    offloaded: list[Storage] = []
    for storage in order:
        runs_again = storage.node in segment and storage.node not in across
        if id(storage) in copied:
            copied_ms = _copied_ms(storage, interval_ms(storage) - busy_ms, costs)
            if not runs_again or copied_ms < _again_ms(storage, saved, segment, costs):
                offloaded.append(storage)
                busy_ms += 2 * costs.copies.ms(storage.nbytes)
                yield Choice(segment, frozenset(kept), tuple(offloaded))
                continue
        saved.difference_update(storage.names)
        kept = kept - (set(storage.names) - across)
        yield Choice(segment, frozenset(kept), tuple(offloaded))


def _read_across(held: Held, segment: Mapping[fx.Node, int]) -> set[fx.Node]:
    """What a segment takes from another one: it runs again from there."""
    nodes = set(held.nodes[: held.backward])
    found: set[fx.Node] = set()
    for node, own in segment.items():
        found |= {value for value in node.all_input_nodes if value in nodes and segment.get(value) != own}
    return found
