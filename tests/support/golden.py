"""Golden texts: printed graphs, plans and schedules, kept in tests/golden/ and compared word by word.

`pytest --update-golden` writes them; what changed is then read in the version control's diff, like any other change.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

GOLDEN_DIR = Path(__file__).parents[1] / "golden"
WRITTEN_WITH = "2.13"
"""The torch whose ops the texts show: which ops a layer becomes, and how they are named, changes between versions."""


@dataclass
class Options:
    """How goldens are treated in this session.

    Attributes:
        update: write the files instead of comparing with them (`--update-golden`).
    """

    update: bool = False


options = Options()


def brief(value: Any, *without: str) -> str:
    """Returns a value in one line: six digits of numbers, and of data classes what is neither empty nor the default."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if is_dataclass(value) and not isinstance(value, type):
        named = [(of.name, getattr(value, of.name), of.default) for of in fields(value) if of.name not in without]
        return ", ".join(f"{name} {brief(each)}" for name, each, default in named if each and each != default)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {brief(each)}" for name, each in value.items())
    return f"({', '.join(map(brief, value))})" if isinstance(value, list | tuple) else str(value)


def check_golden(name: str, text: str) -> None:
    """Compares `text` with tests/golden/{name}.txt; trailing white space of the text's end does not count.

    Fails the test with a unified diff where they differ, and with what to do where there is no such file. Under another
    torch than the one that the texts were written with, a text that differs is skipped: the difference may be torch's.
    """
    __tracebackhide__ = True
    path = GOLDEN_DIR / f"{name}.txt"
    found = text.rstrip() + "\n"
    if options.update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found, encoding="utf-8")
        return
    if not path.exists():
        pytest.fail(
            f"expected the golden file tests/golden/{name}.txt, found none; write it with "
            f"`pytest --update-golden` and read it before you commit it. The text would be:\n{found}",
            pytrace=False,
        )
    expected = path.read_text(encoding="utf-8")
    if found == expected:
        return
    version = ".".join(torch.__version__.split(".")[:2])
    if version != WRITTEN_WITH:
        pytest.skip(f"tests/golden/{name}.txt is written with torch {WRITTEN_WITH}, this is {version}")
    diff = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), f"tests/golden/{name}.txt", "found", lineterm=""
    )
    pytest.fail("\n".join(diff) + "\n\nif the new text is right, write it with `pytest --update-golden`", pytrace=False)


def check_transcript(name: str, answer: Callable[[list[str]], list[str]]) -> None:
    """As `check_golden`, for a file of lines ">>> question" that are each followed by their answer, and of # notes."""
    __tracebackhide__ = True
    kept = [line for line in (GOLDEN_DIR / f"{name}.txt").read_text().splitlines() if line.startswith((">>> ", "#"))]
    answers = iter(answer([line[4:] for line in kept if line.startswith(">>> ")]))
    check_golden(name, "\n".join(f"{line}\n{next(answers)}".rstrip() if line[0] == ">" else line for line in kept))


def run_lines(room: str, modules: Sequence[str], lines: list[str]) -> list[str]:
    """Returns what an interactive Python with the names of these modules of the package's `room` shows after each
    line.
    """
    known: dict[str, Any] = {"torch": torch, "tensor": torch.tensor, "math": math, "cpu": torch.device("cpu")}
    known["numbered"] = lambda *shape: torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    for name in (room, *(f"{room}.{module}" for module in modules)):
        known |= vars(import_module(f"embrace_fx.{name}"))
    found = []
    for line in lines:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            try:
                exec(compile(f"{line}\n", "", "single"), known)
            except Exception as error:
                print(error)
        found.append(shown.getvalue())
    return found
