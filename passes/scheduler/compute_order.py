"""Searches for an order of a backward's compute together with the order in which collectives are launched.

Contract
    A pure function of a step and of the units of its backward: the same order on every machine. A new order is taken
    only where the step, simulated with its own best launch order, becomes shorter by `LEAST_GAIN`, and the backward's
    peak stays within `held_limit`. The search is bounded by a count of orders tried, not by time.

    starts   the present order; tables first; the first k buckets, then tables
    moves    one unit to another place, while that lowers the bound of all launch orders (`link_bound.py`)

The bound takes a hundredth of a simulation, and the search of launches nearly always reaches it.
The time of each atom of compute is estimated (`node_cost`), and scaled so that the compute before each submission takes
the time measured there.

Source: out-of-order back-propagation (Oh et al., EuroSys 2022) defers gradients of weights; here gradients of tables
are moved as well, and the simulated step decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from embrace_fx.passes.node_cost import NodeMs
from embrace_fx.passes.overlap.order import BackwardUnits
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.passes.scheduler.link_bound import link_bound_ms
from embrace_fx.vocabulary.operation_id import compute_id
from embrace_fx.vocabulary.schedule import Schedule, StepGraph
from embrace_fx.vocabulary.submissions import is_submission

TRIED, LOOKED_AT = 2000, 500_000
"""Most orders that a search tries, and most operations of all of them together: about a second of one core."""

LEAST_GAIN = 0.002
"""Fraction of the step; a smaller gain is not worth a change."""

BOUNDS = 100
"""Count of bounds that take as long to compute as one simulation."""

PredictedPeak = Callable[[Sequence[str]], int]
"""Order of units -> peak bytes of a backward in that order."""


@dataclass(frozen=True)
class Atoms:
    """The compute of a backward, divided into atoms: groups of nodes that the same units need, and that are therefore
    reordered together. A unit is the compute before one bucket's or table's gradients can be sent.

    Attributes:
        found: the units of the backward, and the units that need each node.
        ms: maps a bit mask of units, by index in `units`, to the milliseconds of the atom that exactly these units
            need.
        units: names of the units in their present order.
    """

    found: BackwardUnits
    ms: Mapping[int, float]

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the units (the compute before each submission of gradients), in their present order."""
        return self.found.units

    @classmethod
    def build(cls, found: BackwardUnits, node_ms: NodeMs, measured: Mapping[str, float]) -> Atoms:
        """Returns the atoms of a backward.

        Args:
            found: the units of the backward.
            node_ms: function that estimates the milliseconds of a node.
            measured: unit -> measured milliseconds of its compute in the present order. Units that are missing use
                estimates.
        """
        unit_of_node = found.unit_of_node()
        estimated = dict.fromkeys(found.units, 0.0)
        for node, unit in unit_of_node.items():
            estimated[unit] += node_ms(node)
        scale = {unit: measured[unit] / each for unit, each in estimated.items() if unit in measured and each}
        ms: dict[int, float] = {}
        for node, mask in found.needed_by.items():
            if mask and not is_submission(node):  # submissions take no compute time
                ms[mask] = ms.get(mask, 0.0) + node_ms(node) * scale.get(unit_of_node.get(node, ""), 1.0)
        for place, unit in enumerate(found.units):
            if unit in measured and not estimated[unit]:
                ms[1 << place] = ms.get(1 << place, 0.0) + measured[unit]
        return cls(found, ms)

    def durations(self, order: Sequence[str]) -> dict[str, float]:
        """Returns, for each unit, the milliseconds of compute that runs just before its gradients are sent, if units
        run in `order`.
        """
        found = dict.fromkeys(self.found.with_all_units(order), 0.0)
        names, first = tuple(found), self.found.first_unit_of(order)
        for mask, each in self.ms.items():
            found[names[first(mask)]] += each
        return found


def reorder_steps(steps: StepGraph, atoms: Atoms, order: Sequence[str]) -> StepGraph:
    """Returns a copy of the step graph with another order of the backward's units. `atoms` give the time of each unit
    in that order.
    """
    durations = {str(compute_id("backward", unit)): ms for unit, ms in atoms.durations(order).items()}
    operations = tuple(
        replace(each, duration_ms=durations[each.name]) if each.name in durations else each for each in steps.operations
    )
    moved = iter(durations)
    compute_order = tuple(next(moved) if name in durations else name for name in steps.compute_order)
    return replace(steps, operations=operations, compute_order=compute_order)


def search_order(
    steps: StepGraph, name: str, atoms: Atoms, predicted_peak: PredictedPeak, limit_bytes: float
) -> tuple[Schedule, tuple[str, ...]]:
    """Searches for the best combination of a schedule and an order of the backward's units, for a measured step. A unit
    is the compute before one submission of gradients. Returns (schedule, order), where the order is () if the present
    order is best.

    The units are also tried in their present order, because autograd computes some nodes long before the unit that
    needs them.

    Args:
        steps: the step graph in the present order.
        name: the name of the schedule.
        atoms: the atoms of the backward.
        predicted_peak: function that predicts the backward's peak memory in bytes for an order.
        limit_bytes: the maximum of that peak.
    """
    best, best_order = schedule(steps, name, "profile"), tuple[str, ...]()
    if name == "none" or len(atoms.units) < 2:
        return best, ()
    for order, bound_ms in _Search(steps, atoms, predicted_peak, limit_bytes).find_orders():
        if best.diagnostics().step_ms <= bound_ms * (1 + LEAST_GAIN):
            break
        found = schedule(reorder_steps(steps, atoms, order), name, "profile")
        if found.diagnostics().step_ms < best.diagnostics().step_ms * (1 - LEAST_GAIN):
            best, best_order = found, order
    return best, best_order


class _Search:
    """Searches for fast orders of the units (each is the compute before one submission of gradients). Tries each order
    at most once, until a limit on the number of orders is reached.
    """

    def __init__(self, steps: StepGraph, atoms: Atoms, predicted_peak: PredictedPeak, held_limit: float) -> None:
        self._steps, self._atoms = steps, atoms
        self._predicted_peak, self._limit = predicted_peak, held_limit
        self._tried: dict[tuple[str, ...], float] = {}  # order -> lower bound of its step time, in milliseconds
        self._most = min(TRIED, max(LOOKED_AT // len(steps.operations), 1))

    def find_orders(self) -> list[tuple[tuple[str, ...], float]]:
        """Returns the orders with the least lower bound of the step time, each with this bound in milliseconds.

        Several orders may have the same bound without being equally fast. The number of orders is limited, so that
        simulating all of them takes no longer than this search.
        """
        best: tuple[str, ...] = ()
        best_ms = link_bound_ms(self._steps)
        for start in (self._atoms.units, *self._starts()):
            best, best_ms = self._try_order(start, best, best_ms)
        while len(self._tried) < self._most:
            before = best
            for other in _neighbour_orders(best or self._atoms.units):
                best, best_ms = self._try_order(other, best, best_ms)
                if best != before or len(self._tried) >= self._most:
                    break
            if best == before:
                break
        others = (order for order, ms in self._tried.items() if order != best and ms <= best_ms * (1 + LEAST_GAIN))
        fit = (order for order in others if self._predicted_peak(order) <= self._limit)
        first = [best] if best else []
        return [(order, best_ms) for order in islice(chain(first, fit), max(self._most // BOUNDS, 1))]

    def _try_order(
        self, order: tuple[str, ...], best: tuple[str, ...], best_ms: float
    ) -> tuple[tuple[str, ...], float]:
        """Returns (`order`, lower bound of its step time) if it is new, clearly faster and within the memory limit;
        otherwise (`best`, `best_ms`).
        """
        if order in self._tried:
            return best, best_ms
        ms = self._tried[order] = link_bound_ms(reorder_steps(self._steps, self._atoms, order))
        if ms < best_ms * (1 - LEAST_GAIN / 4) and self._predicted_peak(order) <= self._limit:
            return order, ms
        return best, best_ms

    def _starts(self) -> Iterator[tuple[str, ...]]:
        """Yields orders from which to start the search, with some buckets moved before the tables."""
        reduced = {o.id.what for o in self._steps.communications if o.id is not None and o.id.kind == "all_reduce"}
        tables = [unit for unit in self._atoms.units if unit not in reduced]
        buckets = [unit for unit in self._atoms.units if unit in reduced]
        for k in range(min(len(buckets), self._most // 4) + 1 if tables else 0):
            yield (*buckets[:k], *tables, *buckets[k:])


def _neighbour_orders(order: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yields the orders that result from moving one unit to another place, short moves first."""
    for distance in range(1, len(order)):
        for place in range(len(order) - distance):
            for source, target in ((place, place + distance), (place + distance, place)):
                moved = list(order)
                moved.insert(target, moved.pop(source))
                yield tuple(moved)
