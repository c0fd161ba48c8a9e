"""A step within a memory budget: what DELTA keeps, offloads, and computes again (arXiv 2203.15980; TACO 2024).

Contract
    Same values, bit for bit. What the step holds at any time, as predicted on the graph that comes out (`held`), is
    within the budget, or `ValueError` says the least that can be. What the user has checkpointed stays as decided.

    rewrite:  h = relu(x @ w); y = h @ v; ...; gv = h.t() @ g
    ->        h = relu(x @ w); y = h @ v; ...; h_again = relu(x @ w); gv = h_again.t() @ g
    or        as `offload.py` shows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from embrace_fx import cost
from embrace_fx.passes.memory.cheap import RecomputeCheap
from embrace_fx.passes.memory.choose import Choice, Costs, choices
from embrace_fx.passes.memory.foresee import Foreseen, foresee
from embrace_fx.passes.memory.held import Held, held
from embrace_fx.passes.memory.offload import insert_copies, values_that_leave
from embrace_fx.passes.memory.place import NO_COPIES, CopyRate, place
from embrace_fx.passes.memory.regions import can_run_again, compute_again, written_by
from embrace_fx.passes.scheduler.node_cost import estimate
from embrace_fx.vocabulary.graph import TrainingGraph


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
    found = [
        _least_given_up(before, each, limit, costs)
        for each in choices(before, lambda node: can_run_again(node, written), costs)
    ]
    least = before.peak_bytes
    for foreseen in sorted(found, key=lambda each: (each.peak_bytes > limit, each.added_ms, each.peak_bytes)):
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


def _least_given_up(before: Held, each: Sequence[Choice], limit: int, costs: Costs) -> Foreseen:
    """The first of growing choices that keeps to the limit; the one that holds the least where none does."""
    tried: dict[int, Foreseen] = {}

    def at(position: int) -> Foreseen:
        if position not in tried:
            tried[position] = foresee(before, each[position], limit, costs)
        return tried[position]

    # Giving up more may hold more, for what runs again is held, too: several places are looked at.
    places = [(len(each) - 1) * part // 8 for part in range(9)]
    low, high = 0, next((place for place in places if at(place).peak_bytes <= limit), -1)
    if high < 0:
        return min(tried.values(), key=lambda foreseen: foreseen.peak_bytes)
    while low < high:
        middle = (low + high) // 2
        if at(middle).peak_bytes <= limit:
            high = middle
        else:
            low = middle + 1
    return at(high)


def apply(graph: TrainingGraph, before: Held, choice: Choice, limit: int, costs: Costs) -> TrainingGraph:
    """A graph whose backward computes again, and reloads, what the choice says.

    Args:
        before: what the graph holds.
        limit: what it is to hold at most, bytes; copies are placed so, where they can be.
    """
    result = graph.edit()
    numbers = {node.name: (number, node in choice.kept) for node, number in choice.segment.items()}
    for node in result.graph.nodes:
        if node.name in numbers:
            number, kept = numbers[node.name]
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
