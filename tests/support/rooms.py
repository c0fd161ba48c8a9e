"""The rooms of the product, the imports between them, and the list of them that `docs/architecture.md` shows.

    first level   what lies directly in `embrace_fx`, with `passes` and `runtime` as one room each
    opened        the same, but each file or folder in `passes` and `runtime` is a room of its own

`python -m tests.support.rooms` prints the list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[2]
OPENED = ("passes", "runtime")
"""Folders beside `embrace_fx/` that are installed into it, and whose rooms the layers tell apart."""


def module_of(path: Path) -> str:
    """The name that a source file is imported by: `passes/step_memory.py` is `embrace_fx.passes.step_memory`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in OPENED:
        parts = ("embrace_fx", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    """Every module of the product -> its file."""
    files = (path for folder in ("embrace_fx", *OPENED) for path in (ROOT / folder).rglob("*.py"))
    return {module_of(path): path for path in files}


def room_of(module: str, *, opened: bool) -> str:
    """`embrace_fx.passes.memory.memory_timeline` is in `passes`, or, opened, in `passes/memory`."""
    parts = module.split(".")[1:]
    return "/".join(parts[: 2 if opened and parts[0] in OPENED else 1])


def rooms(*, opened: bool) -> nx.DiGraph[str]:
    """The rooms, with an arrow from each one to those it imports from. The package's own `__init__.py` is no room."""
    known = modules()
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module, path in known.items():
        if module == "embrace_fx":
            continue
        room = room_of(module, opened=opened)
        graph.add_node(room)
        for imported in _imported(path):
            other = room_of(imported, opened=opened) if imported != "embrace_fx" else room
            if other != room:
                graph.add_edge(room, other)
    return graph


@cache
def _imported(path: Path) -> tuple[str, ...]:
    known = modules()
    return tuple(name if name in known else name.rpartition(".")[0] for name in _names_imported(path))


def _names_imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "embrace_fx":
                yield name


def sentence_of(room: str) -> str:
    """The first paragraph of a room's head, in one line."""
    base = ROOT if room.split("/", maxsplit=1)[0] in OPENED else ROOT / "embrace_fx"
    file = base / room / "__init__.py" if (base / room).is_dir() else base / f"{room}.py"
    head = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return re.sub(r"\s+", " ", head.split("\n\n")[0])


def listing() -> str:
    """Lists the folders of the first level and of the opened rooms, as Markdown."""
    graph = rooms(opened=True)
    graph.remove_nodes_from([room for room in graph if room.split("/")[0] in OPENED and not (ROOT / room).is_dir()])
    return "\n".join(f"- `{room}`: {sentence_of(room)}" for room in sorted(graph))


if __name__ == "__main__":
    print(listing())
