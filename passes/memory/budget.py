"""A step within a memory budget: what DELTA keeps, offloads, and computes again (arXiv 2203.15980; TACO 2024).

Contract
    Same values, bit for bit. What the step holds at any time, as predicted on the graph that comes out (`held`), is
    within the budget, or `ValueError` says the least that can be. What the user has checkpointed stays as decided.

    rewrite:  h = relu(x @ w); y = h @ v; ...; gv = h.t() @ g
    ->        h = relu(x @ w); y = h @ v; ...; h_again = relu(x @ w); gv = h_again.t() @ g
    or        as `offload.py` shows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

from embrace_fx import cost
from embrace_fx.passes.memory.cheap import RecomputeCheap
from embrace_fx.passes.memory.choose import NEVER, Choice, Growing, choices
from embrace_fx.passes.memory.foresee import Foreseen, Foresight
from embrace_fx.passes.memory.held import Held, held
from embrace_fx.passes.memory.numbered import Costs, Numbered
from embrace_fx.passes.memory.offload import insert_copies, values_that_leave
from embrace_fx.passes.memory.place import NO_COPIES, CopyRate, place
from embrace_fx.passes.memory.regions import can_run_again, compute_again, written_by
from embrace_fx.passes.scheduler.node_cost import estimate
from embrace_fx.vocabulary.graph import TrainingGraph

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
    """

    budget: float
    compute: cost.Compute
    copies: CopyRate = NO_COPIES

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        before = held(graph)
        limit = int(self.budget * before.peak_bytes) if self.budget < 1 else int(self.budget)
        if before.backward == len(before.nodes):  # no backward: nothing is saved
            return graph
        free = RecomputeCheap(self.compute)(graph)
        if held(free).peak_bytes <= limit:
            return replace(free, memory_limit=limit)
        return replace(_within(graph, before, limit, Costs(estimate(self.compute), self.copies)), memory_limit=limit)


def _within(graph: TrainingGraph, before: Held, limit: int, costs: Costs) -> TrainingGraph:
    written = written_by(graph)
    step = Numbered(before, costs)
    search = _Search(Foresight(step), limit)
    for growing in choices(step, lambda node: can_run_again(node, written)):
        search.look_at(growing)
    least = before.peak_bytes
    for foreseen in search.found():
        if foreseen.peak_bytes > limit and least <= foreseen.peak_bytes:
            continue
        result = apply(graph, before, foreseen.choice, limit, costs)
        least = min(least, held(result).peak_bytes)
        if least <= limit:
            return result
    raise ValueError(
        f"expected a memory budget that the step can keep to, in compile(), found {limit:,} bytes, and at least "
        f"{least:,} are needed ({before.peak_bytes:,} where everything is saved). Raise memory_budget, or train on "
        "smaller batches."
    )


class _Search:
    """Choices that keep to a limit, those left out that cannot be the best; of those that do not, the leanest."""

    def __init__(self, foresight: Foresight, limit: int) -> None:
        self._foresight = foresight
        self._limit = limit
        self._within: list[tuple[Foreseen, Growing, int]] = []
        self._above: list[Foreseen] = []
        self._best_ms = inf

    def look_at(self, growing: Growing) -> None:
        """Gives up as little of one sequence as keeps to the limit."""
        tried: dict[int, Foreseen] = {}

        def fits(count: int) -> bool:
            tried[count] = tried.get(count) or self._foresight.foresee(growing.first(count), self._limit)
            return tried[count].peak_bytes <= self._limit

        # Giving up more may hold more, for what runs again is held, too: several places are looked at.
        low, high, before = 1, 0, 0
        for count in sorted({1 + (len(growing) - 1) * part // 8 for part in range(9)}):
            if not self._may_be_better(growing, before + 1):
                break
            if fits(count):
                high = count
                break
            before = count
        if not high:
            self._above += sorted(tried.values(), key=lambda foreseen: foreseen.peak_bytes)[:1]
            return
        while low < high:
            middle = (low + high) // 2
            if fits(middle):
                high = middle
            else:
                low = middle + 1
        self._within.append((tried[high], growing, high))
        self._best_ms = min(self._best_ms, tried[high].added_ms)

    def found(self) -> Iterator[Foreseen]:
        """The best first."""
        best = sorted(self._within, key=lambda each: each[0].added_ms)
        yield from sorted((self._taken_back(*each) for each in best[:BETTERED]), key=lambda each: each.added_ms)
        yield from (foreseen for foreseen, _, _ in best)
        yield from sorted(self._above, key=lambda foreseen: foreseen.peak_bytes)

    def _may_be_better(self, growing: Growing, count: int) -> bool:
        return self._foresight.recomputed_ms(growing.first(count)) < self._best_ms

    def _taken_back(self, foreseen: Foreseen, growing: Growing, count: int) -> Foreseen:
        """Keeps what need not be given up once all the others are: the dearest first."""
        given_up = list(growing.given_up[:count])
        for each in given_up[-MOST_TAKEN_BACK:][::-1]:
            fewer = [other for other in given_up if other is not each]
            kept = self._foresight.foresee(growing.choice(fewer), self._limit)
            if kept.peak_bytes <= self._limit and kept.added_ms < foreseen.added_ms:
                foreseen, given_up = kept, fewer
        return foreseen


def apply(graph: TrainingGraph, before: Held, choice: Choice, limit: int, costs: Costs) -> TrainingGraph:
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
    found = held(graph)
    output = graph.graph.output_node()
    for node in found.nodes:  # the order in which they run: what the backward reads stands behind what the forward does
        output.prepend(node)
    leaving = values_that_leave(found)
    storages = [s for s in found.saved if id(s) in leaving and leaving[id(s)].name in values]
    starts_ms = list(accumulate(map(costs.node_ms, found.nodes), initial=0.0))
    placed = place(storages, found.by_time, starts_ms, found.backward, limit, costs.copies)
    insert_copies(graph, found, placed.copies, costs.copies)
