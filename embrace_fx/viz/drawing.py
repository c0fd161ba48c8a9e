"""Draws graphs as `.dot` and `.svg`, with all compute between two collectives folded into one block.

Compute is a column of boxes, from top to bottom in program order. Communication is beside it in its class's colour.
Arrows lead from the block that computes the sent value to the communication, and on to the block that waits for it.
Graphviz does the layout. Without it, the picture is a table of the same blocks with their dependences.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from torch import fx

from embrace_fx.viz.dot import quote
from embrace_fx.viz.palette import DARK, LIGHT, PAINTS
from embrace_fx.viz.svg import svg_document
from embrace_fx.vocabulary.operation_id import LANES, Lane
from embrace_fx.vocabulary.ops import AWAITS, LAUNCHES, SUBMISSIONS, launch_of, op_name

_NAMED_OPS = 3
"""Maximum number of op kinds in a block's label."""


@dataclass
class Cell:
    """A block of the drawing: a collective, or a run of compute nodes between collectives.

    Attributes:
        phase: the phase of the step, such as "forward".
        lane: "compute", or the collective's class of communication.
        nodes: the graph nodes that the block represents.
        after: indices of the cells on which this one depends.
    """

    phase: str
    lane: Lane
    nodes: list[fx.Node] = field(default_factory=list)
    after: set[int] = field(default_factory=set)

    @property
    def label(self) -> str:
        """The text in the cell: the name of the collective, or the most frequent ops of the compute."""
        if self.lane != "compute":
            launch = launch_of(self.nodes[0])
            return str(launch) if launch is not None else self.nodes[0].name
        ops = Counter(op_name(node).split("::")[-1] or node.name for node in self.nodes)
        names = [name for name, _ in ops.most_common(_NAMED_OPS)]
        more = ", ..." if len(ops) > _NAMED_OPS else ""
        return f"{self.phase}: {len(self.nodes)} ops ({', '.join(names)}{more})"

    @property
    def hover_text(self) -> str:
        """The label and the names of all nodes, shown on hover."""
        return f"{self.label}: {', '.join(node.name for node in self.nodes)}"

    @property
    def paint(self) -> str:
        """The key of the cell's colour in `palette.PAINTS`."""
        return self.lane if self.lane != "compute" else "backward" if self.phase == "backward" else "forward"


def fold_nodes(modules: Mapping[str, fx.GraphModule]) -> list[Cell]:
    """Folds the nodes of graphs into cells: one for each collective, and one for all compute between two collectives.

    Args:
        modules: phase -> its graph, in execution order.
    """
    cells: list[Cell] = []
    sent: dict[object, int] = {}  # launch id, or node of a launch without id -> index of its cell
    for phase, module in modules.items():
        cell_of: dict[fx.Node, int] = {}
        block: int | None = None
        ends = True  # whether the next compute node begins a new block
        for node in module.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            launch = launch_of(node)
            needs = {cell_of[value] for value in node.all_input_nodes if value in cell_of}
            if op_name(node) in SUBMISSIONS | LAUNCHES:
                cells.append(Cell(phase, _lane_of(node), [node], needs | ({block} if block is not None else set())))
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
    """Returns the collective that a node waits for: its launch id, or the node that launches it. Returns None if the
    node is not a wait.
    """
    if op_name(node) != "_c10d_functional::wait_tensor":
        return None
    source = node.all_input_nodes[0]
    return launch_of(source) or source


def _lane_of(node: fx.Node) -> Lane:
    """Returns the lane (class of communication) of the collective that a node launches."""
    launch = launch_of(node)
    if launch is not None:
        return launch.lane
    return next((lane for lane in LANES[1:] if lane in node.args), "dense")


def dot(modules: Mapping[str, fx.GraphModule], title: str) -> str:
    """Returns a drawing of graphs as text in the DOT language of Graphviz.

    Args:
        modules: phase -> its graph, in execution order.
        title: the drawing's title.
    """
    lines = [
        f"  label={quote(title)}; labelloc=t; rankdir=TB; nodesep=0.2; ranksep=0.25;",
        '  node [style=filled, fontname="Helvetica", fontsize=10, height=0.3, penwidth=0.6];',
        "  edge [arrowsize=0.6];",
    ]
    cells = fold_nodes(modules)
    for k, cell in enumerate(cells):
        shape = "box" if cell.lane == "compute" else "ellipse"
        fill, ink = LIGHT.fill[cell.paint], LIGHT.ink[cell.paint]
        more = ', group="compute"' if cell.lane == "compute" else ""
        lines.append(
            f"  c{k} [label={quote(cell.label)}, tooltip={quote(cell.hover_text)}, class={quote(cell.paint)}, "
            f'shape={shape}, fillcolor="{fill}", fontcolor="{ink}"{more}];'
        )
        lines += [
            f"  c{before} -> c{k}{' [weight=20]' if cells[before].lane == cell.lane == 'compute' else ''};"
            for before in sorted(cell.after)
        ]
    return "\n".join(("digraph graphs {", *lines, "}", ""))


LAYOUT_S = 60.0
"""Maximum seconds for Graphviz. A graph that takes longer is drawn as a table."""


def svg(modules: Mapping[str, fx.GraphModule], title: str) -> str:
    """Returns a drawing of graphs as SVG text that follows the reader's light or dark scheme. The arguments are those
    of `dot`.
    """
    laid_out = _graphviz_svg(dot(modules, title))
    return _boxes_svg(fold_nodes(modules), title) if laid_out is None else laid_out


def _graphviz_svg(text: str) -> str | None:
    """Returns Graphviz's SVG for a graph (`text` in DOT), or None if Graphviz is not installed or takes too long."""
    program = shutil.which("dot")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-Tsvg"], input=text, capture_output=True, text=True, check=True, timeout=LAYOUT_S
        )
    except (subprocess.SubprocessError, OSError):
        return None
    picture = done.stdout[done.stdout.index("<svg") :]
    picture = re.sub(r"<svg ", '<svg class="embrace-graphs" style="max-width:100%;height:auto" ', picture, count=1)
    head, ends, rest = picture.partition(">")
    return f"{head}{ends}<style>{_style_of_layout()}</style>{rest}"


def _style_of_layout() -> str:
    """Returns the CSS that gives a drawing by Graphviz its colours in dark mode."""
    whole = ".embrace-graphs"
    rules = [f"{whole}{{background:{DARK.page}}}{whole} .graph>polygon{{fill:{DARK.page};stroke:none}}"]
    rules.append(f"{whole} .graph>text{{fill:{DARK.text}}}{whole} .edge path{{stroke:{DARK.faint}}}")
    rules.append(f"{whole} .edge polygon{{fill:{DARK.faint};stroke:{DARK.faint}}}")
    for name in PAINTS:
        shapes = ",".join(f"{whole} .{name} {shape}" for shape in ("polygon", "ellipse"))
        rules.append(f"{shapes}{{fill:{DARK.fill[name]}}}{whole} .{name} text{{fill:{DARK.ink[name]}}}")
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"


_ROW, _MARGIN = 18, 34
_CHARACTER = 6.2
"""Approximate maximum width of a character in a table, at 10 px."""


def _boxes_svg(cells: Sequence[Cell], title: str) -> str:
    """Returns an SVG that shows cells as a column of boxes under a title, for machines without Graphviz. Beside each
    box are its number and the numbers of the cells on which it depends.
    """
    needs = ["after " + ", ".join(str(k + 1) for k in sorted(cell.after)) if cell.after else "" for cell in cells]
    wide = 44 + _CHARACTER * max((len(cell.label) for cell in cells), default=0)
    width = round(wide + 20 + _CHARACTER * max([len(title), *map(len, needs)]))
    height = _MARGIN + (len(cells) + 1) * _ROW
    lines = []
    for k, (cell, needed) in enumerate(zip(cells, needs, strict=True)):
        top = _MARGIN + k * _ROW
        corner = 2 if cell.lane == "compute" else (_ROW - 3) / 2
        lines.append(
            f'<g><title>{escape(cell.hover_text)}</title><text class="lane" x="30" y="{top + 11}">{k + 1}</text>'
            f'<rect class="f-{cell.paint}" x="36" y="{top}" width="{wide - 36:.0f}" '
            f'height="{_ROW - 3}" rx="{corner:g}"/>'
            f'<text class="i-{cell.paint}" x="44" y="{top + 11}">{escape(cell.label)}</text>'
            f'<text x="{wide + 8:.0f}" y="{top + 11}">{needed}</text></g>'
        )
    heading = f'<text class="title" x="8" y="20">{escape(title)}</text>'
    return svg_document(title, width, height, (), (heading, *lines))
