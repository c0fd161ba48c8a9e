"""Keeps a step within a memory budget by recomputing and offloading, as DELTA does (arXiv 2203.15980; TACO 2024).

Contract
    Same values, bit for bit. The predicted bytes (`step_memory`) that the step holds are always within the budget, or
    `ValueError` gives the minimum. A budget given as a fraction is raised to the minimum, which differs between
    batches. The user's own checkpointing is kept.

    rewrite:  h = relu(x @ w); y = h @ v; ...; gv = h.t() @ g
    ->        h = relu(x @ w); y = h @ v; ...; h_again = relu(x @ w); gv = h_again.t() @ g
    or        as `offload.py` shows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from embrace_fx.cost import links as cost
from embrace_fx.passes.memory.choose import NEVER, Choice, EvictionSequence, TimedStep, eviction_sequences
from embrace_fx.passes.memory.copy_placement import NO_COPIES, CopyRate, place_copies
from embrace_fx.passes.memory.memory_simulator import MemorySimulator, SimulatedMemory
from embrace_fx.passes.memory.offload import InsertCopies, offloadable_values
from embrace_fx.passes.memory.recompute_cheap import RecomputeCheap
from embrace_fx.passes.memory.regions import can_recompute, with_recomputed
from embrace_fx.passes.node_cost import node_time_estimator
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.vocabulary.graph import TrainingGraph, written_by

AIMS = 3
"""Number of lower limits to try if a graph holds more than simulated, for example saved random states."""

BETTERED = 3
"""Number of best choices that the search tries to improve by evicting fewer storages."""

MOST_TAKEN_BACK = 100
"""Number of storages of a choice that the search tries to keep instead."""


@dataclass(frozen=True)
class Memory:
    """The pass that keeps a step's memory within a budget, by recomputing or offloading values that the forward would
    save.

    Attributes:
        budget: bytes; if below 1, a fraction of the bytes that the step holds when everything is saved.
        compute: the device's speed, from which the time of nodes that have not been measured is estimated.
        copies: the speed of copies between the device and the host, or to a file; by default nothing is offloaded.
        on_relaxed: called with (requested bytes, minimum bytes) if nothing meets a budget given as a fraction.
    """

    budget: float
    compute: cost.Compute
    copies: CopyRate = NO_COPIES
    on_relaxed: Callable[[int, int], None] = lambda asked, least: None

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        before = step_memory(graph)
        limit = int(self.budget * before.peak_bytes) if self.budget < 1 else int(self.budget)
        if before.backward == len(before.nodes):  # without a backward, nothing is saved
            return graph
        free = RecomputeCheap(self.compute)(graph)
        if step_memory(free).peak_bytes <= limit:
            return replace(free, memory_limit=limit)
        step = TimedStep(before, node_time_estimator(self.compute, graph.expected), self.copies)
        found = _fit_limit(graph, free, step, limit)
        least = step_memory(found).peak_bytes
        if least <= limit:
            return replace(found, memory_limit=limit)
        if self.budget >= 1:
            raise ValueError(
                f"memory_budget: a step with this batch needs at least {least:,} bytes ({before.peak_bytes:,} bytes "
                f"without recomputing), but the budget is {limit:,} bytes. Raise memory_budget, or use smaller batches."
            )
        self.on_relaxed(limit, least)
        return replace(found, memory_limit=least)


def _fit_limit(graph: TrainingGraph, recomputed: TrainingGraph, step: TimedStep, limit: int) -> TrainingGraph:
    """Returns the fastest graph found whose memory is within the limit. If no graph fits, returns the graph with the
    lowest peak.

    Args:
        recomputed: `graph` with the user's checkpointed regions recomputed.
        step: the nodes, memory and times of `graph`.
        limit: the maximum bytes that the step may hold.
    """
    written = written_by(graph.module)
    simulator, sequences = (
        MemorySimulator(step),
        list(eviction_sequences(step, lambda node: can_recompute(node, written))),
    )
    aim = limit
    for _ in range(AIMS):
        best = _Search(simulator, aim).best(sequences)
        if best is None:
            break
        result = apply_choice(graph, step, best.choice, aim)
        over = step_memory(result).peak_bytes - limit
        if over <= 0:
            return result
        aim -= over
    leanest, least = recomputed, step_memory(recomputed).peak_bytes
    for simulated in _lowest_peaks(simulator, sequences, limit):
        if simulated.peak_bytes < least:
            result = apply_choice(graph, step, simulated.choice, limit)
            if (held := step_memory(result).peak_bytes) < least:
                leanest, least = result, held
            if least <= limit:
                break
    return leanest


def _eviction_counts(sequence: EvictionSequence) -> list[int]:
    """Returns up to nine numbers of storages to evict (recompute or offload), evenly spaced from one to all storages of
    a sequence.

    Several numbers are tried, because evicting more storages may increase the peak: the backward holds recomputed
    values.
    """
    return sorted({1 + (len(sequence) - 1) * part // 8 for part in range(9)})


def _lowest_peaks(
    simulator: MemorySimulator, sequences: Sequence[EvictionSequence], limit: int
) -> list[SimulatedMemory]:
    """Returns, for each sequence of storages to evict, the choice with the lowest predicted peak memory, sorted by
    peak.

    Args:
        limit: the maximum bytes that the step may hold, used to place copies.
    """
    simulated = (
        [simulator.simulate(sequence.first(n), limit) for n in _eviction_counts(sequence)] for sequence in sequences
    )
    return sorted((min(each, key=lambda f: f.peak_bytes) for each in simulated), key=lambda f: f.peak_bytes)


class _Search:
    """Searches for the fastest choice of values to evict (recompute or offload) within a memory limit, with few
    simulations.
    """

    def __init__(self, simulator: MemorySimulator, limit: int) -> None:
        self._simulator = simulator
        self._limit = limit
        self._best_ms = inf

    def best(self, sequences: Sequence[EvictionSequence]) -> SimulatedMemory | None:
        """Searches all sequences for choices that fit the memory limit. Returns the choice that adds the least time to
        a step, or None if no choice fits.
        """
        found = [each for sequence in sequences for each in self._fitting_choices(sequence)]
        better = [self._save_again(*each) for each in sorted(found, key=lambda each: each[0].added_ms)[:BETTERED]]
        return min(better, key=lambda simulated: simulated.added_ms, default=None)

    def _fitting_choices(self, sequence: EvictionSequence) -> Iterator[tuple[SimulatedMemory, EvictionSequence, int]]:
        """Yields the choice that evicts the fewest storages of a sequence and still fits the memory limit, with the
        sequence and the number of evicted storages. Yields nothing if no choice fits, or if the choice would be slower
        than the best one found so far.
        """
        tried: dict[int, SimulatedMemory] = {}

        def fits(count: int) -> bool:
            """Returns whether the peak stays within the limit if the first `count` storages are evicted."""
            tried[count] = tried.get(count) or self._simulator.simulate(sequence.first(count), self._limit)
            return tried[count].peak_bytes <= self._limit

        low, high, before = 1, 0, 0
        for count in _eviction_counts(sequence):
            if self._simulator.recomputed_ms(sequence.first(before + 1)) >= self._best_ms:
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
        yield tried[high], sequence, high

    def _save_again(self, simulated: SimulatedMemory, sequence: EvictionSequence, count: int) -> SimulatedMemory:
        """Improves a choice: saves an evicted storage after all if the choice then becomes faster and still fits the
        memory limit. Tries the last evicted storage first. Returns the improved choice.

        Args:
            simulated: the choice that evicts the first `count` storages of `sequence`.
        """
        evicted = list(sequence.evicted[:count])
        for each in evicted[-MOST_TAKEN_BACK:][::-1]:
            fewer = [other for other in evicted if other is not each]
            kept = self._simulator.simulate(sequence.choice(fewer), self._limit)
            if kept.peak_bytes <= self._limit and kept.added_ms < simulated.added_ms:
                simulated, evicted = kept, fewer
        return simulated


def apply_choice(graph: TrainingGraph, step: TimedStep, choice: Choice, limit_bytes: int) -> TrainingGraph:
    """Returns the graph whose backward recomputes and reloads the values that `choice` evicts.

    Args:
        step: the nodes, memory and times of `graph`.
        choice: which values are saved, offloaded or recomputed.
        limit_bytes: maximum bytes that the step may hold, used to place copies.
    """
    nodes = step.memory.nodes
    regions = {nodes[k].name: number for k, number in enumerate(choice.segment) if number != NEVER}
    result = with_recomputed(graph, regions, {nodes[k].name for k in choice.kept})
    if choice.offloaded:
        leave = offloadable_values(step.memory)
        _offload(result, {leave[storage].name for storage in choice.offloaded}, limit_bytes, step)
    return result


def _offload(graph: TrainingGraph, values: set[str], limit: int, step: TimedStep) -> None:
    """Inserts the offloads and reloads of some values in place.

    Args:
        values: the names of the nodes that compute the values.
        limit: the maximum bytes that the step may hold, used to place the copies.
        step: the times of the nodes, and the speed of the copies.
    """
    found = step_memory(graph)
    output = graph.graph.output_node()
    for node in found.nodes:  # in this order, nodes of the forward come before those of the backward
        output.prepend(node)
    leaving = offloadable_values(found)
    storages = [s for s in found.saved if s in leaving and leaving[s].name in values]
    starts_ms = replace(step, memory=found).starts_ms
    placed = place_copies(storages, found.bytes_at_node, starts_ms, found.backward, limit, step.copies)
    InsertCopies(graph, found, step.copies)(placed.copies)
