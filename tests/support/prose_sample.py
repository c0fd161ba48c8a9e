"""Draws a sample of the project's prose, for a reader who has not seen the code to judge.

    python -m tests.support.prose_sample [SEED]

The seed is today's date unless given. Of definitions the reader judges whether name, signature and docstring say what
the thing does; of everything else, whether a native writer would have put it so.
"""

from __future__ import annotations

import ast
import datetime
import random
import re
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterator

from tests.support.rooms import ROOT, modules

COUNTS = {"definitions": 60, "errors": 20, "comments": 20, "commits": 15, "paragraphs": 10}
LATEST_COMMITS = 100
MIN_PARAGRAPH_WORDS = 20


def definitions() -> Iterator[str]:
    """Yields the signature and docstring of every class and function, except special methods."""
    for where, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("__"):
                yield f"{where}:{node.lineno}\n{_signature(node)}\n{ast.get_docstring(node) or '(no docstring)'}"


def _signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def errors() -> Iterator[str]:
    """Yields every `raise` of a message."""
    for where, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                yield f"{where}:{node.lineno}\n{ast.unparse(node.exc)}"


def comments() -> Iterator[str]:
    """Yields every comment; lines below each other are one."""
    for path in modules().values():
        with path.open("rb") as file:
            found = [each for each in tokenize.tokenize(file.readline) if each.type == tokenize.COMMENT]
        block: list[tokenize.TokenInfo] = []
        for each in [*found, None]:
            follows = each and block and each.start == (block[-1].start[0] + 1, block[-1].start[1])
            if block and not follows:
                yield f"{path.relative_to(ROOT)}:{block[0].start[0]}\n" + "\n".join(line.string for line in block)
                block = []
            if each and not re.match(r"# (noqa|type:|fmt:)", each.string):
                block.append(each)


def commits() -> Iterator[str]:
    """Yields the messages of the latest commits."""
    command = ["git", "log", f"-{LATEST_COMMITS}", "--format=%h %s%n%b%x00"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    yield from filter(None, (each.strip() for each in said.split("\0")))


def paragraphs() -> Iterator[str]:
    """Yields the paragraphs of README and docs, without tables and code."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
        for each in re.split(r"\n\s*\n", text):
            if not each.startswith(("|", "#", "    ", ":::")) and len(each.split()) >= MIN_PARAGRAPH_WORDS:
                yield f"{path.relative_to(ROOT)}\n{each}"


def _trees() -> Iterator[tuple[str, ast.Module]]:
    for path in modules().values():
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def main(seed: str) -> None:
    drawn = random.Random(seed)
    for kind, source in zip(COUNTS, (definitions, errors, comments, commits, paragraphs), strict=True):
        print(f"# {COUNTS[kind]} {kind}, seed {seed}\n")
        for number, each in enumerate(drawn.sample(sorted(source()), COUNTS[kind]), 1):
            head, _, text = each.partition("\n")
            print(f"{number}. {head}\n{textwrap.indent(text, '    ')}\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else datetime.date.today().isoformat())
