"""`.dot`: the step graph for Graphviz, blocks and communications with their dependences.

Compute nodes are boxes in a column, in program order. Communication nodes are rounded, in their class's colour. A solid
edge is a dependence within the window, a dashed one reaches into the next window, and a thin grey one is program order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from embrace_fx.viz.palette import LIGHT, paint
from embrace_fx.viz.picture import MIB
from embrace_fx.vocabulary.schedule import Operation, Schedule


def render(schedule: Schedule) -> str:
    """Returns the graph of a step's operations and their dependences in the DOT language. Collectives show their
    position in the launch order.
    """
    return "\n".join(("digraph step {", *(f"  {line}" for line in _lines(schedule)), "}", ""))


def _lines(schedule: Schedule) -> Iterator[str]:
    """Yields lines in the DOT language that draw a step's operations and the dependences between them."""
    steps = schedule.steps
    critical = {name for _, name in schedule.critical_path}
    place = {name: number for number, name in enumerate(schedule.launch_order, start=1)}
    yield f"label={quote(f'Step graph, schedule {schedule.name}')};"
    yield 'labelloc=t; rankdir=TB; nodesep=0.25; ranksep=0.3; bgcolor="white"; fontname="Helvetica";'
    yield f'node [style=filled, fontname="Helvetica", fontsize=10, penwidth=0.6, color="{LIGHT.critical}"];'
    yield f'edge [color="{LIGHT.faint}", arrowsize=0.6];'
    for operation in steps.operations:
        yield _node(operation, place.get(operation.name), operation.name in critical)
    program = dict.fromkeys(pairwise(steps.compute_order))
    true = {(d.before, d.after) for d in steps.dependences if d.distance == 0}
    for edge in program:
        yield _edge(*edge, "weight=20" if edge in true else f'weight=20, color="{LIGHT.line}", arrowhead=none')
    for d in steps.dependences:
        if d.distance:
            yield _edge(d.before, d.after, f'style=dashed, constraint=false, label="+{d.distance}", fontsize=9')
        elif (d.before, d.after) not in program:
            yield _edge(d.before, d.after)


def _edge(before: str, after: str, attributes: str = "") -> str:
    """Returns an edge between two operations, given by name, in the DOT language.

    Args:
        attributes: the edge's attributes in the DOT language, such as "style=dashed".
    """
    return f"{quote(before)} -> {quote(after)}{f' [{attributes}]' if attributes else ''};"


def _node(operation: Operation, place: int | None, is_critical: bool) -> str:
    """Returns an operation as a node in the DOT language.

    Args:
        place: the position of a collective in the launch order, from 1; None for compute.
        is_critical: whether the operation is on the critical path.
    """
    lines = [operation.name, f"{operation.duration_ms:.2f} ms"]
    if not operation.is_compute:
        lines[1] += f", {operation.sent_bytes / MIB:.2f} MiB"
    if place is not None:
        lines[0] = f"{place}. {operation.name}"
    attributes = {
        "label": "\n".join(lines),
        "fillcolor": LIGHT.fill[paint(operation)],
        "fontcolor": LIGHT.ink[paint(operation)],
        "shape": "box" if operation.is_compute else "ellipse",
        "tooltip": f"{operation.lane}: {', '.join(operation.serves)}",
    }
    if operation.is_compute:
        attributes["group"] = "compute"
    if is_critical:
        attributes["penwidth"] = "2.5"
    return f"{quote(operation.name)} [{', '.join(f'{k}={quote(v)}' for k, v in attributes.items())}];"


def quote(text: str) -> str:
    """Quotes text for the DOT language, where a backslash begins an escape except before a quote."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
