"""Improves launch orders of a step by local search.

Contract
    The order returned is legal and no slower than the best of those given. The search is bounded by a count, not by
    time, and draws the same random numbers everywhere: its result is the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from embrace_fx.passes.scheduler.link_machine import TOLERANCE, LinkMachine, WindowTimes

SEARCH_STARTS = 500_000
"""Most starts of operations that the search simulates: less than half a second of one core."""
SHAKES = 8
"""The search ends after this many shaken orders in a row that lead to no better one."""


def improve_order(machine: LinkMachine, orders: list[list[int]], bound_ms: float) -> list[int]:
    """Improves the fastest of several launch orders by local search on the simulated machine. Returns the best order
    found.

    First tries moves of launches on the critical path, then any move. When no move helps, starts again from a randomly
    changed order. Ends when a limit on the number of simulated operations is reached, or when no order can be faster
    than the best one.

    Args:
        bound_ms: a lower bound of the step time for every order.
    """
    search = _Search(machine, bound_ms)
    step_ms, _, best = min((search.step_ms(order), k, order) for k, order in enumerate(orders))
    current, current_ms = best, step_ms
    fruitless = 0
    while len(best) > 1 and step_ms > search.bound_ms and fruitless <= SHAKES and search.starts_left > 0:
        current, current_ms = search.descend(current, current_ms)
        fruitless += 1
        if current_ms < step_ms * (1 - TOLERANCE):
            best, step_ms, fruitless = current, current_ms, 0
        current = search.shake(best)
        current_ms = search.step_ms(current)
    return best


class _Search:
    """Searches for a faster launch order, until `SEARCH_STARTS` operations have been simulated."""

    def __init__(self, machine: LinkMachine, bound_ms: float) -> None:
        self.machine = machine
        self.starts_left = SEARCH_STARTS
        self.bound_ms = bound_ms * (1 + TOLERANCE)
        # `random.random` gives the same numbers on all machines and in all versions.
        self._draw = random.Random(0).random

    def run(self, order: list[int]) -> WindowTimes | None:
        """Simulates a launch order. Returns the times of its operations, or None if the order deadlocks."""
        sequence = self.machine.sequence_if_legal(order)
        found = None if sequence is None else self.machine.run(sequence)
        self.starts_left -= len(order) if found is None else len(found.ends) * len(found.ends[0])
        return found

    def step_ms(self, order: list[int]) -> float:
        """Returns the step time of a launch order in milliseconds, or infinity if the order deadlocks."""
        run = self.run(order)
        return run.step_ms if run is not None else float("inf")

    def descend(self, order: list[int], step_ms: float) -> tuple[list[int], float]:
        """Applies moves of launches that shorten the step, until no move does or the limit on simulated operations is
        reached. Returns the final order and its step time in milliseconds.
        """
        better = True
        while better and step_ms > self.bound_ms:
            better = False
            for neighbour in self._neighbours(order):
                if self.starts_left <= 0:
                    return order, step_ms
                found_ms = self.step_ms(neighbour)
                if found_ms < step_ms * (1 - TOLERANCE):
                    order, step_ms, better = neighbour, found_ms, True
                    break
        return order, step_ms

    def shake(self, order: list[int]) -> list[int]:
        """Makes up to three random moves that keep the launch order legal. Returns the new order, or the same one if no
        move is legal.
        """
        for _ in range(3):
            moved = _move_launch(order, self._random_below(len(order)), self._random_below(len(order)))
            if self.machine.sequence_if_legal(moved) is not None:
                order = moved
        return order

    def _neighbours(self, order: list[int]) -> Iterator[list[int]]:
        """Yields launch orders that differ by one move: first moves along the critical path, then all others in random
        order.
        """
        run = self.run(order)
        assert run is not None
        for first, last in _critical_blocks(self.machine.critical_path(run, order), order):
            # If a block of launches has no gap, it ends sooner only if a different launch is its first or last one.
            for k in range(last, first, -1):
                yield _move_launch(order, k, first)
            for k in range(first, last):
                yield _move_launch(order, k, last)
        size = len(order)
        moves = [(source, target) for source in range(size) for target in range(size) if source != target]
        for k in range(len(moves)):
            other = k + self._random_below(len(moves) - k)
            moves[k], moves[other] = moves[other], moves[k]
            source, target = moves[k]
            yield _move_launch(order, source, target)
            if source < target:
                swapped = list(order)
                swapped[source], swapped[target] = swapped[target], swapped[source]
                yield swapped

    def _random_below(self, bound: int) -> int:
        """Returns a random integer from 0 to `bound` - 1."""
        return int(self._draw() * bound)


def _move_launch(order: list[int], source: int, target: int) -> list[int]:
    """Returns a copy of a launch order, in which the launch at position `source` is moved to position `target`."""
    moved = list(order)
    moved.insert(target, moved.pop(source))
    return moved


def _critical_blocks(path: list[tuple[int, int]], order: list[int]) -> Iterator[tuple[int, int]]:
    """Yields (first position, last position) of each run of two or more launches that follow each other directly on a
    critical path.

    Args:
        path: (window, operation) of the critical operations.
        order: the launch order.
    """
    position = {launch: k for k, launch in enumerate(order)}
    seen = set()
    block: list[tuple[int, int]] = []  # (window, position) of critical operations
    for window, k in [*path, (-1, -1)]:
        here = (window, position.get(k, -1))
        if block and here != (block[-1][0], block[-1][1] + 1):
            found = (block[0][1], block[-1][1])
            if found[0] < found[1] and found not in seen:
                seen.add(found)
                yield found
            block = []
        if here[1] >= 0:
            block.append(here)
