"""Draws graphs as `.dot` and `.svg`: what computes between two communications is one block.

Compute is a column of boxes, the program from top to bottom; communication stands beside it in columns of its classes.
An edge leads from the block that makes what travels, and to the block that waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from torch import fx

from embrace_fx.viz.palette import DARK, LIGHT, PAINTS, Theme
from embrace_fx.vocabulary.operation_id import LANES, Lane
from embrace_fx.vocabulary.ops import AWAITS, LAUNCHES, SUBMISSIONS, launch_of, op_name

_NAMED_OPS = 3
"""So many kinds of a block's ops are told by name."""


@dataclass
class Cell:
    """A block of compute, or a communication.

    Attributes:
        lane: of a communication; "compute" of a block.
        nodes: what it does.
        after: the places of the cells that it needs.
    """

    phase: str
    lane: Lane
    nodes: list[fx.Node] = field(default_factory=list)
    after: set[int] = field(default_factory=set)

    @property
    def label(self) -> str:
        if self.lane != "compute":
            launch = launch_of(self.nodes[0])
            return str(launch) if launch is not None else self.nodes[0].name
        ops = Counter(op_name(node).split("::")[-1] or node.name for node in self.nodes)
        names = [name for name, _ in ops.most_common(_NAMED_OPS)]
        more = ", ..." if len(ops) > _NAMED_OPS else ""
        return f"{self.phase}: {len(self.nodes)} ops ({', '.join(names)}{more})"

    @property
    def paint(self) -> str:
        return self.lane if self.lane != "compute" else "backward" if self.phase == "backward" else "forward"


def fold(parts: Mapping[str, fx.GraphModule]) -> list[Cell]:
    """The cells of modules that run one after the other."""
    cells: list[Cell] = []
    sent: dict[object, int] = {}  # launch, or the node of one without an id -> its cell
    for phase, module in parts.items():
        cell_of: dict[fx.Node, int] = {}
        block: int | None = None
        ends = True  # what computes next begins a block
        for node in module.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            launch = launch_of(node)
            needs = {cell_of[value] for value in node.all_input_nodes if value in cell_of}
            if op_name(node) in SUBMISSIONS | LAUNCHES:
                cells.append(Cell(phase, _lane(node), [node], needs | ({block} if block is not None else set())))
                cell_of[node] = sent[launch or node] = len(cells) - 1
                ends = True
                continue
            awaited = launch if op_name(node) in AWAITS else _waited_for(node)
            if ends or block is None or awaited is not None:
                cells.append(Cell(phase, "compute", after=set() if block is None else {block}))
                block, ends = len(cells) - 1, False
            if awaited is not None and awaited in sent:
                cells[block].after.add(sent[awaited])
            cells[block].nodes.append(node)
            cells[block].after |= needs - {block}
            cell_of[node] = block
    return cells


def _waited_for(node: fx.Node) -> object | None:
    """The launch whose value a node waits for."""
    if op_name(node) != "_c10d_functional::wait_tensor":
        return None
    source = node.all_input_nodes[0]
    return launch_of(source) or source


def _lane(node: fx.Node) -> Lane:
    launch = launch_of(node)
    if launch is not None:
        return launch.lane
    return next((lane for lane in LANES[1:] if lane in node.args), "dense")


def dot(parts: Mapping[str, fx.GraphModule], title: str) -> str:
    """Text of the DOT language."""
    lines = [f"  label={_quoted(title)}; labelloc=t; rankdir=TB;", '  node [style=filled, fontname="Helvetica"];']
    for k, cell in enumerate(fold(parts)):
        shape = "box" if cell.lane == "compute" else "ellipse"
        fill, ink = LIGHT.fill[cell.paint], LIGHT.ink[cell.paint]
        lines.append(f'  c{k} [label={_quoted(cell.label)}, shape={shape}, fillcolor="{fill}", fontcolor="{ink}"];')
        lines += [f"  c{before} -> c{k};" for before in sorted(cell.after)]
    return "\n".join(("digraph graphs {", *lines, "}", ""))


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


_WIDTH, _HEIGHT, _GAP, _MARGIN = 250, 20, 8, 34
_COLUMN = 190
_CHARACTER = 5.6
"""Mean width of a character of a label, 10 px high."""


def svg(parts: Mapping[str, fx.GraphModule], title: str) -> str:
    """Text of an SVG file, in the reader's light or dark scheme."""
    cells = fold(parts)
    lanes = [lane for lane in LANES if any(cell.lane == lane for cell in cells)]
    width = _WIDTH + _COLUMN * (len(lanes) - 1) + 3 * _GAP
    height = _MARGIN + len(cells) * (_HEIGHT + _GAP) + _GAP
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">',
            f'<title id="title">{escape(title)}</title>',
            f"<style>{_style()}</style>",
            f'<rect class="page" width="{width}" height="{height}"/>',
            f'<text class="head" x="{_GAP}" y="20">{escape(title)}</text>',
            *_edges(cells, lanes),
            *_boxes(cells, lanes),
            "</svg>",
            "",
        )
    )


def _style() -> str:
    def theme(colours: Theme) -> str:
        paints = "".join(
            f".{name}{{fill:{colours.fill[name]}}}.t-{name}{{fill:{colours.ink[name]}}}" for name in PAINTS
        )
        return f".page{{fill:{colours.page}}}.head{{fill:{colours.text}}}path{{stroke:{colours.faint}}}{paints}"

    shared = "text{font:10px Helvetica,Arial,sans-serif}.head{font-size:13px}path{fill:none;stroke-width:.8}"
    return f"{shared}{theme(LIGHT)}@media (prefers-color-scheme:dark){{{theme(DARK)}}}"


def _place(k: int, cell: Cell, lanes: list[Lane]) -> tuple[float, float, float]:
    """Left, top and width of a cell."""
    column = lanes.index(cell.lane)
    top = _MARGIN + k * (_HEIGHT + _GAP)
    if cell.lane == "compute":
        return _GAP, top, _WIDTH
    first = _WIDTH + 2 * _GAP if lanes[0] == "compute" else _GAP
    return first + (column - (lanes[0] == "compute")) * _COLUMN, top, _COLUMN - _GAP


def _boxes(cells: list[Cell], lanes: list[Lane]) -> Iterator[str]:
    for k, cell in enumerate(cells):
        left, top, width = _place(k, cell, lanes)
        most = int((width - 8) / _CHARACTER)
        text = cell.label if len(cell.label) <= most else f"{cell.label[: most - 1]}…"
        names = ", ".join(node.name for node in cell.nodes)
        corner = 2 if cell.lane == "compute" else _HEIGHT / 2
        yield (
            f'<g><title>{escape(f"{cell.label}: {names}")}</title><rect class="{cell.paint}" x="{left}" y="{top}" '
            f'width="{width}" height="{_HEIGHT}" rx="{corner:g}"/>'
            f'<text class="t-{cell.paint}" x="{left + 6:g}" y="{top + 13.5:g}">{escape(text)}</text></g>'
        )


def _edges(cells: list[Cell], lanes: list[Lane]) -> Iterator[str]:
    for k, cell in enumerate(cells):
        left, top, width = _place(k, cell, lanes)
        for before in sorted(cell.after):
            from_left, from_top, from_width = _place(before, cells[before], lanes)
            x1, y1 = from_left + from_width / 2, from_top + _HEIGHT
            x2, y2 = left + width / 2, top
            bend = (y1 + y2) / 2
            yield f'<path d="M{x1:g} {y1:g}C{x1:g} {bend:g} {x2:g} {bend:g} {x2:g} {y2:g}"/>'
