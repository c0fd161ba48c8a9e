"""A step within a memory budget: what DELTA keeps, offloads, and computes again (arXiv 2203.15980; TACO 2024).

Contract
    Same values, bit for bit. What the step holds at any time, as predicted on the graph that comes out (`held`), is
    within the budget, or `ValueError` says the least that can be; a budget as a fraction gives way to that least, for
    batches differ in what their steps must hold. What the user has checkpointed stays as decided.

    rewrite:  h = relu(x @ w); y = h @ v; ...; gv = h.t() @ g
    ->        h = relu(x @ w); y = h @ v; ...; h_again = relu(x @ w); gv = h_again.t() @ g
    or        as `offload.py` shows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from embrace_fx import cost
from embrace_fx.passes.memory.cheap import RecomputeCheap
from embrace_fx.passes.memory.choose import NEVER, Choice, Growing, choices
from embrace_fx.passes.memory.foresee import Foreseen, Foresight
from embrace_fx.passes.memory.numbered import Costs, Numbered
from embrace_fx.passes.memory.offload import insert_copies, values_that_leave
from embrace_fx.passes.memory.place import NO_COPIES, CopyRate, place
from embrace_fx.passes.memory.regions import can_run_again, compute_again, written_by
from embrace_fx.passes.node_cost import estimate
from embrace_fx.passes.step_memory import StepMemory, step_memory
from embrace_fx.vocabulary.graph import TrainingGraph

AIMS = 3
"""Where a graph holds more than was foreseen, what random draws save say, so often is less aimed at."""

BETTERED = 3
"""Of so many choices, the best, it is tried to give up less."""

MOST_TAKEN_BACK = 100
"""Storages of a choice of which it is tried whether they can be kept all the same."""


@dataclass(frozen=True)
class Memory:
    """Brings what a step holds down to a budget.

    Attributes:
        budget: bytes; a fraction below 1 of what the step holds where everything is saved.
        compute: how fast nodes run.
        copies: how fast values are offloaded and reloaded; by default none is.
        told_least: called where a fraction asks for less than can be, with the bytes it asks for and the least.
    """

    budget: float
    compute: cost.Compute
    copies: CopyRate = NO_COPIES
    told_least: Callable[[int, int], None] = lambda asked, least: None

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        before = step_memory(graph)
        limit = int(self.budget * before.peak_bytes) if self.budget < 1 else int(self.budget)
        if before.backward == len(before.nodes):  # no backward: nothing is saved
            return graph
        free = RecomputeCheap(self.compute)(graph)
        if step_memory(free).peak_bytes <= limit:
            return replace(free, memory_limit=limit)
        costs = Costs(estimate(self.compute, graph.expected), self.copies)
        found = _within(graph, free, before, limit, costs)
        least = step_memory(found).peak_bytes
        if least <= limit:
            return replace(found, memory_limit=limit)
        if self.budget >= 1:
            raise ValueError(
                f"expected a memory budget that the step can keep to, in compile(), found {limit:,} bytes, and at "
                f"least {least:,} are needed ({before.peak_bytes:,} where everything is saved). Raise memory_budget, "
                "or train on smaller batches."
            )
        self.told_least(limit, least)
        return replace(found, memory_limit=least)


def _within(graph: TrainingGraph, free: TrainingGraph, before: StepMemory, limit: int, costs: Costs) -> TrainingGraph:
    """Searches for a graph within a limit; where there is none, returns what holds the least, `free` at worst."""
    written = written_by(graph)
    step = Numbered(before, costs)
    foresight, sequences = Foresight(step), list(choices(step, lambda node: can_run_again(node, written)))
    aim = limit
    for _ in range(AIMS):
        best = _Search(foresight, aim).best(sequences)
        if best is None:
            break
        result = apply(graph, before, best.choice, aim, costs)
        over = step_memory(result).peak_bytes - limit
        if over <= 0:
            return result
        aim -= over
    leanest, least = free, step_memory(free).peak_bytes
    for foreseen in _leanest(foresight, sequences, limit):
        if foreseen.peak_bytes < least:
            result = apply(graph, before, foreseen.choice, limit, costs)
            if (held := step_memory(result).peak_bytes) < least:
                leanest, least = result, held
            if least <= limit:
                break
    return leanest


def _counts(growing: Growing) -> list[int]:
    """Counts of storages to give up first, nine of them evenly spread. More may hold more: what runs again is held,
    too.
    """
    return sorted({1 + (len(growing) - 1) * part // 8 for part in range(9)})


def _leanest(foresight: Foresight, sequences: Sequence[Growing], limit: int) -> list[Foreseen]:
    """Foresees, of each sequence, the choice that holds the least; sorts them by what they hold."""
    foreseen = ([foresight.foresee(growing.first(n), limit) for n in _counts(growing)] for growing in sequences)
    return sorted((min(each, key=lambda f: f.peak_bytes) for each in foreseen), key=lambda f: f.peak_bytes)


class _Search:
    """Looks for the choice that keeps to a limit at the least time; what cannot be it is not simulated."""

    def __init__(self, foresight: Foresight, limit: int) -> None:
        self._foresight = foresight
        self._limit = limit
        self._best_ms = inf

    def best(self, sequences: Sequence[Growing]) -> Foreseen | None:
        """Finds the choice within the limit that takes the least time; None: there is none."""
        found = [each for growing in sequences for each in self._first_of(growing)]
        better = [self._taken_back(*each) for each in sorted(found, key=lambda each: each[0].added_ms)[:BETTERED]]
        return min(better, key=lambda foreseen: foreseen.added_ms, default=None)

    def _first_of(self, growing: Growing) -> Iterator[tuple[Foreseen, Growing, int]]:
        """The choice of a sequence that gives up the least, and how much that is."""
        tried: dict[int, Foreseen] = {}

        def fits(count: int) -> bool:
            tried[count] = tried.get(count) or self._foresight.foresee(growing.first(count), self._limit)
            return tried[count].peak_bytes <= self._limit

        low, high, before = 1, 0, 0
        for count in _counts(growing):
            if self._foresight.recomputed_ms(growing.first(before + 1)) >= self._best_ms:
                return
            if fits(count):
                high = count
                break
            before = count
        if not high:
            return
        while low < high:
            middle = (low + high) // 2
            if fits(middle):
                high = middle
            else:
                low = middle + 1
        self._best_ms = min(self._best_ms, tried[high].added_ms)
        yield tried[high], growing, high

    def _taken_back(self, foreseen: Foreseen, growing: Growing, count: int) -> Foreseen:
        """Keeps what need not be given up once all the others are: the dearest first."""
        given_up = list(growing.given_up[:count])
        for each in given_up[-MOST_TAKEN_BACK:][::-1]:
            fewer = [other for other in given_up if other is not each]
            kept = self._foresight.foresee(growing.choice(fewer), self._limit)
            if kept.peak_bytes <= self._limit and kept.added_ms < foreseen.added_ms:
                foreseen, given_up = kept, fewer
        return foreseen


def apply(graph: TrainingGraph, before: StepMemory, choice: Choice, limit: int, costs: Costs) -> TrainingGraph:
    """A graph whose backward computes again, and reloads, what the choice says.

    Args:
        before: what the graph holds.
        limit: what it is to hold at most, bytes; copies are placed so, where they can be.
    """
    result = graph.edit()
    numbers = {before.nodes[k].name: (number, k in choice.kept) for k, number in enumerate(choice.segment)}
    for node in result.graph.nodes:
        number, kept = numbers.get(node.name, (NEVER, False))
        if number != NEVER:
            node.meta["region"], node.meta["kept"] = (number,), kept
    compute_again(result)
    if choice.offloaded:
        _offload(result, {values_that_leave(before)[id(storage)].name for storage in choice.offloaded}, limit, costs)
    result.graph.lint()
    result.module.recompile()
    return result


def _offload(graph: TrainingGraph, values: set[str], limit: int, costs: Costs) -> None:
    """Puts in the copies of values, by name, in place."""
    found = step_memory(graph)
    output = graph.graph.output_node()
    for node in found.nodes:  # the order in which they run: what the backward reads stands behind what the forward does
        output.prepend(node)
    leaving = values_that_leave(found)
    storages = [s for s in found.saved if id(s) in leaving and leaving[id(s)].name in values]
    starts_ms = list(accumulate(map(costs.node_ms, found.nodes), initial=0.0))
    placed = place(storages, found.by_time, starts_ms, found.backward, limit, costs.copies)
    insert_copies(graph, found, placed.copies, costs.copies)
