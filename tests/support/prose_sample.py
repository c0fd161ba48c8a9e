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
    """Yields the qualified name, signature and docstring of every class and function, except special methods."""
    for where, tree in _trees():
        for node, qualified_name in _definitions(tree):
            if not node.name.startswith("__"):
                docstring = ast.get_docstring(node) or "(no docstring)"
                yield f"{where}:{node.lineno}\n{_signature(node, qualified_name)}\n{docstring}"


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[ast.ClassDef | ast.FunctionDef, str]]:
    """Yields the classes and functions below a node, each with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node, prefix + node.name
            yield from _definitions(node, f"{prefix}{node.name}.")
        else:
            yield from _definitions(node, prefix)


def _signature(node: ast.ClassDef | ast.FunctionDef, qualified_name: str) -> str:
    if isinstance(node, ast.ClassDef):
        return f"class {qualified_name}({', '.join(map(ast.unparse, node.bases))})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    decorators = [f"@{ast.unparse(each)}" for each in node.decorator_list]
    return "\n".join([*decorators, f"def {qualified_name}({ast.unparse(node.args)}){returns}"])


def errors() -> Iterator[str]:
    """Yields every `raise` of a message, with the definition of each constant or function that holds the text."""
    texts = _texts()
    for where, tree in _trees():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
                continue
            raised = ast.unparse(node.exc)
            wrap_names = {_last_name(each) for each in ast.walk(node.exc) if isinstance(each, ast.Name | ast.Attribute)}
            found = [text for name in sorted(wrap_names) for text in texts.get(name, ())]
            if found or re.search(r"['\"].* .*['\"]", raised):  # a `raise` without text re-raises another error
                yield "\n".join([f"{where}:{node.lineno}", raised, *found])


def _texts() -> dict[str, list[str]]:
    """Maps the names of constants and functions that hold the text of an error to their code."""
    texts: dict[str, list[str]] = {}
    for _, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.JoinedStr | ast.BinOp):
                name, code = _last_name(node.targets[0]), ast.unparse(node)
                is_text = name.isupper() and re.search(r"\w \w+ \w", code) is not None
            elif isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns).endswith("Error"):
                name, is_text = node.name, True
                code = "\n".join(map(ast.unparse, (each for each in node.body if not _is_docstring(each))))
            else:
                continue
            if is_text:
                texts.setdefault(name, []).append(code)
    return texts


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def comments() -> Iterator[str]:
    """Yields every comment, with the code before or below it. Lines below each other are one; dividers are left out."""
    for path in modules().values():
        with path.open("rb") as file:
            found = [each for each in tokenize.tokenize(file.readline) if each.type == tokenize.COMMENT]
        lines = path.read_text(encoding="utf-8").splitlines()
        block: list[tokenize.TokenInfo] = []
        for each in [*found, None]:
            follows = each and block and each.start == (block[-1].start[0] + 1, block[-1].start[1])
            if block and not follows:
                first, last = block[0].start[0], block[-1].start[0]
                below = not block[0].line.split("#")[0].strip() and last < len(lines)
                shown = textwrap.dedent("\n".join(lines[first - 1 : last + below]))
                yield f"{path.relative_to(ROOT)}:{first}\n{shown}"
                block = []
            if each and not re.match(r"# (noqa|type:|fmt:|-{2,} )", each.string):
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
