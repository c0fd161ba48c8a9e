"""The house: few rooms on the first level, no circle at any, and the page that lists them is right."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import networkx as nx
import pytest

from tests.support.rooms import ROOT, listing, modules, rooms, sentence_of

MOST_ROOMS, MOST_ARROWS = 15, 60


def test_the_first_level_can_be_kept_in_the_head() -> None:
    first = rooms(opened=False)
    assert {"session", "planning", "passes", "runtime", "vocabulary", "cost"} < set(first)
    assert len(first) <= MOST_ROOMS, sorted(first)
    assert first.number_of_edges() <= MOST_ARROWS, sorted(first.edges)


@pytest.mark.parametrize("opened", [False, True])
def test_no_room_imports_itself_by_way_of_others(opened: bool) -> None:
    circles = [sorted(found) for found in nx.strongly_connected_components(rooms(opened=opened)) if len(found) > 1]
    assert circles == []


@pytest.mark.parametrize("layer", ["embrace_fx", "passes", "runtime"])
def test_no_two_modules_of_a_layer_share_a_name(layer: str) -> None:
    paths = [path.relative_to(ROOT) for path in modules().values()]
    stems = Counter(path.stem for path in paths if path.parts[0] == layer)
    assert not {name for name, count in stems.items() if count > 1 and not name.startswith("__")}


def test_every_room_says_what_it_holds_in_a_sentence() -> None:
    for room in rooms(opened=True):
        assert 20 < len(sentence_of(room)) < 240, room
        assert sentence_of(room).endswith((".", ":")), room


def test_the_page_lists_the_rooms_as_their_heads_describe_them() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert listing() in page, "docs/architecture.md: expected the output of `python -m tests.support.rooms`"


def imported_tests(path: Path) -> list[str]:
    """Returns the names of the test modules that a file imports from."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
        for name in (alias.name, f"{getattr(node, 'module', None)}.{alias.name}")
    ]
    return [name for name in names if name.startswith("tests.") and ".test_" in name]


def test_no_module_imports_from_a_test_module() -> None:
    """What tests share is in `tests/support`."""
    files = [path for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): names for path in files if (names := imported_tests(path))}
    assert len(files) > 400
    assert found == {}
