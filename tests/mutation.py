"""Faults planted at random, one at a time: which of them does the suite find?

    python -m tests.mutation --count 60 --seed 0 --output build/mutation.json        # tests near it, then all of them
    python -m tests.mutation --again build/mutation.json --output build/after.json   # the same faults, other tests
    python -m tests.mutation --tests tests/cost tests/passes -- -n 2                 # a part; pytest's own options

Rooms of `embrace_fx/`, `passes/` and `runtime/` have faults in proportion to their lines; none is in a docstring, an
annotation, a text, an assertion (`strict=` of `zip()` is one), what is raised, how an object is printed, or a number
that a module names, which is a choice. Each is planted in a copy of the tree, which ranks import too, and pytest runs
the tests of its file, of its room, those that import it, and all, until a first test fails. That test then runs without
the fault: one that fails there as well has found nothing, and is left out from then on. What is known is kept in
`--output`, and the same command goes on.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PRODUCT = ("embrace_fx", "passes", "runtime")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
UNKNOWN = {"outcome": "", "found_by": ""}
PASSED = (0, 5)  # exit codes of pytest: all tests passed, or none was collected
NO_SUCH_TEST = 4  # exit code of pytest if the fault renames the test
HOOK = """# of every process of a run: the package is the copy's, whatever is installed
import sys
from importlib.machinery import PathFinder
class Copied:
    def find_spec(name, path=None, target=None):
        if name in ("embrace_fx", "embrace_fx.passes", "embrace_fx.runtime"):
            return PathFinder.find_spec(name, [__file__.rpartition("/")[0]])
sys.meta_path.insert(0, Copied)
"""
OPPOSITE = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*"), ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
CHECKS = ("strict", "allow_nan", "stacklevel", "repr", "compare")  # keywords that only check, name a line or print
COMMUTATIVE = ("max", "min", "add", "mul", "maximum", "minimum", "logical_and", "logical_or", "isinstance")

Span = tuple[int, int, int, int]  # (line, column, end line, end column) as in `ast`: columns count bytes


@dataclass
class Fault:
    """A change of lines in a file, from `before` to `after`. `outcome` is empty until the fault has been tested."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    outcome: str = ""
    found_by: str = ""


def span(node: Any) -> Span:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def changes(node: ast.AST, text_of: Callable[[Span], str]) -> Iterator[tuple[str, Span, str]]:
    """Kinds of faults that a node may have, their places, and the text that stands there then."""
    match node:
        case (
            ast.BinOp(left=left, op=op, right=right)
            | ast.Compare(left=left, ops=[op], comparators=[right])
            | ast.BoolOp(values=[left, right, *_], op=op)
        ):
            old, new = OPPOSITE.get(type(op), ("", ""))
            gap = (*span(left)[2:], *span(right)[:2])
            if old and old in text_of(gap):
                kind = {ast.BinOp: "sign", ast.Compare: "comparison"}.get(type(node), "condition")
                yield kind, gap, text_of(gap).replace(old, new, 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield "sign", span(node), text_of(span(operand))
        case ast.Slice(lower=lower, upper=upper):
            yield from (("bound", span(each), f"({text_of(span(each))} + 1)") for each in (lower, upper) if each)
        case ast.Call(func=ast.Name(id="range"), args=[*_, last]) if not isinstance(last, ast.Starred):
            yield "bound", span(last), f"({text_of(span(last))} - 1)"
        case ast.Call(func=called, args=[first, second, *_]) if not text_of(span(called)).endswith(COMMUTATIVE):
            both, between = (*span(first)[:2], *span(second)[2:]), text_of((*span(first)[2:], *span(second)[:2]))
            yield "argument swapped", both, f"{text_of(span(second))}{between}{text_of(span(first))}"
        case ast.Constant(value=bool(value)):
            yield "constant", span(node), str(not value)
        case ast.Constant(value=int() | float() as number):
            yield "constant", span(node), repr(number * 2 if number and isinstance(number, float) else number + 1)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            yield "condition", span(test), f"(not ({text_of(span(test))}))"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "left out", span(node), "pass"
        case ast.For(iter=items):
            yield "one forgotten", span(items), f"[*{text_of(span(items))}][1:]"
        case ast.FunctionDef(returns=ast.Constant(value=None), body=body) if len(body) > 1:
            line, column, *_ = span(body[1] if ast.get_docstring(node) else body[0])
            yield "early return", (line, column, line, column), f"return\n{' ' * column}"


def computed(value: ast.AST) -> bool:
    """Returns whether a value calls or reads anything."""
    return any(isinstance(each, ast.Call | ast.Name) for each in ast.walk(value))


def sound(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that may have a fault: all that run, except what is raised, asserted or printed."""
    yield node
    apart = [*getattr(node, "decorator_list", ()), *(getattr(node, name, None) for name in ("returns", "annotation"))]
    for child in ast.iter_child_nodes(node):
        is_choice = isinstance(node, ast.Module) and isinstance(child, ast.Assign) and not computed(child.value)
        is_check = (isinstance(child, ast.keyword) and child.arg in CHECKS) or is_choice
        if not (child in apart or is_check or isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.arg)):
            yield from sound(child)


def draw_of(file: Path, chance: random.Random) -> Fault | None:
    """Returns a random fault in a file: first its kind, then its place. None if the file can have no fault."""
    text = file.read_text(encoding="utf-8")
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]

    def text_of(place: Span) -> str:
        return text.encode()[starts[place[0] - 1] + place[1] : starts[place[2] - 1] + place[3]].decode()

    found = [each for node in sound(ast.parse(text)) for each in changes(node, text_of)]
    if not found:
        return None
    of_kind = chance.choice(sorted({kind for kind, _, _ in found}))
    kind, (line, column, end, end_column), new = chance.choice([each for each in found if each[0] == of_kind])
    before = text_of((line, 0, end, len(lines[end - 1])))
    after = text_of((line, 0, line, column)) + new + text_of((end, end_column, end, len(lines[end - 1])))
    return Fault(str(file.relative_to(ROOT)), line, kind, before, after)


def draw(count: int, seed: int) -> list[Fault]:
    """Faults at random: rooms in proportion to their lines, then files likewise, then a kind, then a place."""
    chance, rooms = random.Random(seed), defaultdict[Path, dict[Path, int]](dict)
    for file in sorted(path for top in PRODUCT for path in (ROOT / top).rglob("*.py")):
        rooms[file.parent][file] = len(file.read_text(encoding="utf-8").splitlines()) + 1
    room_of_line = [room for room, files in rooms.items() for _ in range(sum(files.values()))]
    begun, drawn = chance.random(), list[Fault]()
    while len(drawn) < count:  # choose folders by evenly spaced positions among the lines of all folders
        files = rooms[room_of_line[int((len(drawn) + begun) / count * len(room_of_line))]]
        fault = draw_of(chance.choices([*files], [*files.values()])[0], chance)
        if fault and fault not in drawn:
            drawn.append(fault)
    return drawn


def near(fault: Fault) -> Iterator[list[str]]:
    """What pytest is asked for, one call after the other: the tests of the file, its room and its readers, then all."""
    file, tests = Path(fault.file), ROOT / "tests"
    room = tests / Path(*file.parent.parts[file.parts[0] == "embrace_fx" :])
    module = ".".join(file.with_suffix("").parts).removeprefix("embrace_fx.").removesuffix(".__init__")
    reads = re.compile(rf"embrace_fx\.{re.escape(module)}\b")
    found = [path for path in tests.rglob("test_*.py") if path.parent == room or reads.search(path.read_text())]
    found.sort(key=lambda path: (path.stem != f"test_{file.stem}", path.parent != room, path))
    yield from filter(None, ([str(path.relative_to(ROOT)) for path in found], ["tests"]))


class Runner:
    """A copy of the source tree in which pytest runs."""

    def __init__(self, tree: Path, options: Sequence[str], unsound: list[str]) -> None:
        self.tree, self.options, self.unsound = tree, options, unsound
        shutil.copytree(ROOT, tree, ignore=NOT_COPIED, dirs_exist_ok=True)
        (tree / "sitecustomize.py").write_text(HOOK)

    def run(self, words: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Returns pytest's exit status, or None after a timeout, and the first test that failed."""
        left_out = [f"--deselect={each}" for each in self.unsound]
        command = ["-m", "pytest", "-x", "-v", "-p", "no:cacheprovider", "--tb=no", *self.options, *left_out, *words]
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": self.tree}
        how |= {"env": {**os.environ, "PYTHONPATH": str(self.tree), "OMP_NUM_THREADS": "1"}, "start_new_session": True}
        with subprocess.Popen([sys.executable, *command], **how) as started:
            try:
                told, status = started.communicate(timeout=max(1.0, limit_s))[0], started.wait()
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)  # also kills the test's ranks
                told, status = started.communicate()[0], None
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", told, re.M)
        begun = re.findall(r"^(tests/\S+\.py::.*?)(?: [A-Z]+.*)?$", told, re.M)
        return status, (failed[:1] or begun[-1:] or [told[-300:]])[0]

    def judge(self, fault: Fault, tests: list[str], limit_s: float) -> None:
        """Plants a fault where its lines are, the nearest to its own, and writes into it what became of it."""
        until_s, file = time.monotonic() + limit_s, self.tree / fault.file
        calls = [tests] if tests else list(near(fault))
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        starts = [found.start() for found in re.finditer(re.escape(fault.before), text)]
        at = min(starts, key=lambda start: abs(text.count("\n", 0, start) + 1 - fault.line), default=None)
        fault.outcome = "survived" if at is not None else "not applicable"
        while at is not None and calls and fault.outcome == "survived":
            _write(file, text[:at] + fault.after + text[at + len(fault.before) :])
            status, found_by = self.run(calls[0], until_s - time.monotonic())
            _write(file, text)
            if status in PASSED:
                calls.pop(0)
                continue
            fault.outcome, fault.found_by = "timed out" if status is None else "killed", found_by
            again = [found_by] if found_by.startswith("tests/") else [*calls[0], "--collect-only"]
            if status is not None and self.run(again, limit_s)[0] not in (*PASSED, NO_SUCH_TEST):
                if "::" not in found_by:
                    raise SystemExit(f"expected tests that can be collected without a fault, found {found_by}")
                self.unsound.append(found_by)
                fault.outcome = "survived"


def _write(file: Path, text: str) -> None:
    """Writes a file with a later modification time, because Python compares those of compiled modules in seconds."""
    then = file.stat().st_mtime + 10
    file.write_text(text, encoding="utf-8")
    os.utime(file, (then, then))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--count", type=int, default=60)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--again", type=Path, help="a result, whose faults are planted in place of new ones")
    ask.add_argument("--tests", nargs="+", default=[], help="what pytest is asked for, in their place")
    ask.add_argument("--timeout", type=float, default=1200.0, help="seconds of a fault")
    ask.add_argument("--output", type=Path, default=ROOT / "build" / "mutation.json")
    ask.add_argument("options", nargs="*", help="after --, pytest's own")
    asked = ask.parse_args()
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = {"faults": [], "unsound": []}
    if asked.output.exists():
        kept = json.loads(asked.output.read_text())
    elif asked.again:
        kept["faults"] = [each | UNKNOWN for each in json.loads(asked.again.read_text())["faults"]]
    faults = [Fault(**each) for each in kept["faults"]] or draw(asked.count, asked.seed)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        runner = Runner(Path(folder), asked.options, kept["unsound"])
        for number, fault in enumerate(faults, 1):
            if not fault.outcome:
                runner.judge(fault, asked.tests, asked.timeout)
                whole = {"faults": [asdict(each) for each in faults], "unsound": runner.unsound}
                asked.output.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
            print(f"{number} {fault.file}:{fault.line} {fault.kind}: {fault.outcome} {fault.found_by}", flush=True)
    print(dict(Counter(fault.outcome for fault in faults)))


if __name__ == "__main__":
    main()
