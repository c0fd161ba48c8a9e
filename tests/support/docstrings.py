"""A lint, run by `make lint`: few docstrings begin with a relative word; who does what to what stands first instead.

    What it adds to a step: buckets there are in any case.   ->   Prices what this table adds to a step.

Predicates, which return a bool, may begin with "Whether".
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tests.support.rooms import ROOT, modules

RELATIVE = {"How", "If", "Likewise", "Of", "That", "Those", "What", "When", "Where", "Whether", "Which", "Who", "Why"}
MOST = 0.05
"""Share of the docstrings of modules, classes, and functions that are no predicates."""


class Docstring(NamedTuple):
    where: str
    name: str
    text: str
    is_predicate: bool


def docstrings() -> Iterator[Docstring]:
    """Yields the docstring of every module, class and function of the product that has one."""
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                is_predicate = isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node) == "bool"
                where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
                yield Docstring(where, getattr(node, "name", module), text, is_predicate)


def main() -> int:
    found = [each for each in docstrings() if not each.is_predicate]
    relative = [f"{each.where}: {each.text.splitlines()[0]}" for each in found if each.text.split()[0] in RELATIVE]
    if len(relative) <= MOST * len(found):
        return 0
    print(*relative, sep="\n")
    print(
        f"expected a relative word at the head of at most {MOST:.0%} of {len(found)} docstrings, found {len(relative)}"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
