"""Reorders the backward's compute so that the gradients needed first are ready to send first.

Autograd uses one order of the backward, but the dependences allow many. A weight's gradient is read only by its
AllReduce, so it can be computed before or after the nodes that a table's gradient depends on.

Contract
    Same nodes, same values, bit for bit. A unit is all submissions of one table, joined table or bucket. The units'
    submissions have the given order. Each compute node is placed with the first unit that needs it, and keeps its order
    within the unit. Nodes with effects (random draws, awaits, updates, recomputed nodes, ops that write into their
    arguments) keep their order.

    rewrite:  gx = mm(g, w); gw = mm(x, g); submit bucket 0 (gw); rows = backward(gx); submit words (rows)
    ->        gx = mm(g, w); rows = backward(gx); submit words (rows); gw = mm(x, g); submit bucket 0 (gw)

Source: out-of-order backpropagation (Oh et al., EuroSys 2022). Here a simulation decides, and tables are included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from torch import fx

from embrace_fx.passes.overlap.launches import Phases, rewrite_phases
from embrace_fx.passes.overlap.submit_early import HEAD, may_move
from embrace_fx.passes.rewriter import first_after_placeholders
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import launch_of, op_name
from embrace_fx.vocabulary.submissions import is_submission


@dataclass(frozen=True)
class OrderCompute:
    """The pass that reorders the compute of the backward. It moves units, each of which is the compute that is needed
    before one bucket's or table's gradients can be sent.

    Attributes:
        units: names of tables and buckets, in the new order. Other units follow in their old order.
    """

    units: tuple[str, ...]

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        if "backward" not in graph.phases:
            return graph
        found = BackwardUnits.find(graph.phases["backward"])
        if not self.units or found.order_nodes(self.units) == [*found.needed_by]:
            return graph
        return rewrite_phases(graph, self._rewrite)

    def _rewrite(self, phases: Phases) -> None:
        """Sorts the nodes of the backward by the order of units (the compute before each submission of gradients)."""
        backward = phases["backward"]
        found = BackwardUnits.find(backward)
        place = first_after_placeholders(backward.graph).prev
        for node in found.order_nodes(self.units):
            place.append(node)
            place = node


@dataclass(frozen=True)
class BackwardUnits:
    """The units of a backward. A unit is the compute needed before one bucket's or table's gradients can be sent.

    Attributes:
        units: names of tables and buckets, in the order in which their gradients are sent.
        needed_by: maps each node, in program order, to a bit mask of the units that need its value, by index in
            `units`. Excludes placeholders and the output.
    """

    units: tuple[str, ...]
    needed_by: Mapping[fx.Node, int]

    @classmethod
    def find(cls, backward: fx.GraphModule) -> BackwardUnits:
        """Finds the units (the compute before each submission of gradients) of a backward, and the units that need each
        of its nodes.
        """
        nodes = [node for node in backward.graph.nodes if node.op not in ("placeholder", "output")]
        member = {node: what for node in nodes if (what := _submitted_unit(node)) is not None}
        units = tuple(dict.fromkeys(member.values()))
        bit = {what: 1 << k for k, what in enumerate(units)}
        needed = {node: bit[member[node]] if node in member else 0 for node in nodes}
        before = _fixed_before(nodes, member)
        for node in reversed(nodes):
            for value in (*node.all_input_nodes, *before.get(node, ())):
                if value in needed:
                    needed[value] |= needed[node]
        return cls(units, needed)

    def unit_of_node(self) -> dict[fx.Node, str]:
        """Maps each node to the unit (table or bucket) whose gradients are the next ones submitted after the node.
        Nodes after the last submission are left out.
        """
        found: dict[fx.Node, str] = {}
        pending: list[fx.Node] = []
        last = None
        for node in self.needed_by:
            unit = _submitted_unit(node) if is_submission(node) else None
            if unit is None:
                pending.append(node)
            elif unit != last:
                found |= dict.fromkeys(pending, unit)
                pending, last = [], unit
        return found

    def with_all_units(self, order: Sequence[str]) -> tuple[str, ...]:
        """Returns the units (the compute before each submission of gradients) in `order`, followed by all other
        units.
        """
        known = [unit for unit in order if unit in self.units]
        return (*known, *(unit for unit in self.units if unit not in known))

    def order_nodes(self, order: Sequence[str]) -> list[fx.Node]:
        """Returns all nodes, sorted by the order of units. A node is placed in the first unit that needs it. Nodes that
        no unit needs come last.
        """
        groups: dict[int, list[fx.Node]] = {k: [] for k in range(len(self.units) + 1)}
        first = self.first_unit_of(order)
        for node, mask in self.needed_by.items():
            groups[first(mask)].append(node)
        return [node for k in sorted(groups) for node in groups[k]]

    def first_unit_of(self, order: Sequence[str]) -> Callable[[int], int]:
        """Returns a function that takes a bit mask of units, and returns the index in `order` of the first of these
        units. For an empty mask, it returns the number of units.
        """
        place = {unit: k for k, unit in enumerate(self.with_all_units(order))}
        places = [place[unit] for unit in self.units]
        return cache(lambda mask: min((places[k] for k in _set_bits(mask)), default=len(places)))


def _set_bits(mask: int) -> Iterator[int]:
    """Yields the positions of the bits that are set in a mask."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _submitted_unit(node: fx.Node) -> str | None:
    """Returns the table or bucket whose gradients a node submits, or None if it submits none."""
    launch = launch_of(node)
    if op_name(node) == "embrace::defer_bucket":
        launch = launch_of(node.all_input_nodes[0])
    elif not is_submission(node) or launch is None or launch.kind == "lookups":
        return None
    return launch.what if launch is not None else None


def _fixed_before(nodes: Sequence[fx.Node], unit_of: Mapping[fx.Node, str]) -> dict[fx.Node, list[fx.Node]]:
    """Maps each node to the nodes that must run before it although it does not read their values.

    Nodes with side effects keep their order. The backward starts with nodes that finish the previous step's updates and
    send rows; all other nodes stay after these.

    Args:
        unit_of: node that submits gradients -> name of the table or bucket whose gradients they are.
    """
    before: dict[fx.Node, list[fx.Node]] = {}
    fixed = [node for node in nodes if node not in unit_of and not may_move(node)]
    for previous, node in pairwise(fixed):
        before[node] = [previous]
    head = [node for node in fixed if op_name(node) in HEAD]
    if head:
        for node in nodes[nodes.index(head[-1]) + 1 :]:
            before.setdefault(node, []).append(head[-1])
    return before
