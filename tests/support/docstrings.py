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
"""Share of the docstrings of functions and classes that are no predicates."""


class Docstring(NamedTuple):
    where: str
    name: str
    text: str
    is_predicate: bool


def docstrings() -> Iterator[Docstring]:
    """Yields the docstring of every function and class of the product that has one."""
    for path in modules().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                is_predicate = isinstance(node, ast.FunctionDef) and ast.unparse(node.returns or node) == "bool"
                yield Docstring(f"{path.relative_to(ROOT)}:{node.lineno}", node.name, text, is_predicate)


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
