"""The site is built without a warning; what its pages show runs."""

from __future__ import annotations

import logging
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import embrace_fx
from embrace_fx import cli
from tests.support.graphs import analysed, sharding, text

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LONG_PROGRAMS = ("bert.py", "recommender.py", "save.py")
"""Titles of snippets that take seconds; a snippet that begins with an import is a program."""
FRAGMENTS = ("README", "admm", "index", "memory", "operations", "scheduling", "strategies")
"""Pages with parts of a program that the reader knows; `tests/training/test_from_ddp.py` has one more."""


def snippets() -> list[tuple[str, str, str]]:
    """Returns (page, title, text) of every Python block. The title is empty if a block has none."""
    block = re.compile(r'^```python(?: title="(.*?)")?\n(.*?)^```', re.DOTALL | re.M)
    pages = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
    return [(page.stem, *found) for page in pages for found in block.findall(page.read_text(encoding="utf-8"))]


def is_program(page: str, text: str) -> bool:
    return page != "admm" and text.startswith(("import ", "from "))


PROGRAMS = [
    pytest.param(page, text, id=title or page, marks=[pytest.mark.long] if title in LONG_PROGRAMS else [])
    for page, title, text in snippets()
    if is_program(page, text)
]


def test_the_site_is_built_without_warnings_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="of the extra `docs`")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert {path.stem for path in (tmp_path / "site").glob("*.html")} == pages | {"404"}
    reference = (tmp_path / "site" / "errors.html").read_text(encoding="utf-8")
    assert "dense gradients are reduced and applied until" in re.sub(r"\s+", " ", reference)
    assert not re.findall(r'(?:src|href)="https?://(?!squidfunk|www\.mkdocs)', reference)  # loads nothing remote


def test_every_page_with_snippets_is_tried() -> None:
    fragments = {page for page, _, text in snippets() if not is_program(page, text)}
    assert fragments == {*FRAGMENTS, "from_ddp"}
    assert set(LONG_PROGRAMS) < {title for page, title, text in snippets() if is_program(page, text)}


PAGES = (*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_files_and_folders_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:embrace_fx|passes|runtime|tests|benchmarks|examples|docs)/[\w/.-]*)[`:]",
        page.read_text(encoding="utf-8"),
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_modules_and_names_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`(embrace_fx(?:\.\w+)+)", page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not _resolves(name)] == []


def _resolves(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Changes to a temporary folder, as a single process, and restores the state of `logging` afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    torch.manual_seed(0)
    logger = logging.getLogger("embrace_fx")
    level = logger.level
    yield tmp_path
    logger.setLevel(level)


@pytest.mark.parametrize(("page", "program"), PROGRAMS)
def test_what_a_page_shows_runs(page: str, program: str, here: Path) -> None:
    if "transformers" in program:
        pytest.importorskip("transformers", reason="of the extra `test`")
    names: dict[str, Any] = {"__name__": "__page__"}  # not "__main__", in whose module torch would look classes up
    exec(compile(program, f"{page}.md", "exec"), names)
    assert names.keys() > {"__name__"}  # the program has defined something


class LanguageModel(nn.Module):
    """Has a table that is tied to its output layer, under the name that GPT-2's table has."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(50, 4)})

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        table: Any = self.transformer["wte"]
        return nn.functional.cross_entropy(table(ids_T) @ table.weight.T, ids_T)


def reader(*, compiled: bool) -> dict[str, Any]:
    """Returns the names that a snippet may use without defining them."""
    deep = (layer for _ in range(12) for layer in (nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)))
    plain = nn.Sequential(nn.Embedding(50, 4), *deep, nn.Linear(4, 1))  # deep enough for a memory budget of half
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loader = [(torch.arange(6),)] * 3
    known: dict[str, Any] = {
        "embrace_fx": embrace_fx,
        "torch": torch,
        "distributed": torch.distributed,
        "nn": nn,
        "optimizer": optimizer,
        "loader": loader,
        "batch": loader[0],
        "log": pytest.fail,
        "loss_of": torch.mean,
        "inputs": torch.randn(12, 3, 8),
        "classes": torch.arange(12) % 2,
        "model": plain,
    }
    if compiled:
        model = known["model"] = embrace_fx.compile(plain, optimizer=optimizer)

        def step() -> None:
            for _ in range(3):
                model(torch.arange(6)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        step()
        known["step"] = step
    return known


@pytest.mark.parametrize(
    "page", [pytest.param(each, marks=[pytest.mark.long] if each != "operations" else []) for each in FRAGMENTS]
)
def test_what_a_page_quotes_runs(page: str, here: Path) -> None:
    fragments = [text for of, _, text in snippets() if of == page and not is_program(page, text)]
    assert fragments
    for snippet in fragments:
        program = re.sub(r"^( +)\.\.\.$", r"\1step()", snippet, flags=re.M)
        # If a snippet only compiles models, each of its lines gets a new model.
        parts = program.splitlines() if program.startswith("model = embrace_fx.compile") else [program]
        for part in parts:
            known = reader(compiled=page in ("operations", "scheduling"))
            if "wte" in part:
                known["model"] = LanguageModel()
            exec(compile(part, f"{page}.md", "exec"), known)
            if part is not program and part:
                known["model"](torch.arange(48)).mean().backward()


def test_the_graphs_that_a_page_shows_are_those_of_its_model() -> None:
    """The lines of `docs/reading.md`, whatever the numbers of sizes that depend on the batch."""

    class Ratings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(200_000, 64), nn.Embedding(200_000, 64)

        def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
            return (self.user(users) * self.item(items)).sum()

    captured = analysed(Ratings(), torch.arange(256), torch.arange(256))
    shown = re.findall(r"^```text\n(.*?)^```", (DOCS / "reading.md").read_text(encoding="utf-8"), re.DOTALL | re.M)
    for quoted, graph in zip(shown, (captured, sharding("item.weight", world_size=2)(captured)), strict=True):
        lines = [
            re.sub(r"torch\.ops\.|\.default|\bu\d+", lambda m: "u" if m[0][0] == "u" else "", line)
            for line in text(graph.module).splitlines()
        ]
        for line in re.sub(r"\bu\d+", "u", quoted).splitlines():
            assert any(line in each for each in lines), line


def commands_of_the_page() -> list[str]:
    text = (DOCS / "reading.md").read_text(encoding="utf-8")
    return re.findall(r"^\$ (.*)$", text, re.M)


def with_files_of_the_page(folder: Path) -> None:
    """Writes the files that the page shows, because its commands read them."""
    text = (DOCS / "reading.md").read_text(encoding="utf-8")
    for name, content in re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', text, re.DOTALL | re.M):
        (folder / name).write_text(content, encoding="utf-8")


def test_the_page_has_every_command_and_they_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_files_of_the_page(here)
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(sys, "path", list(sys.path))
    commands = [shlex.split(each) for each in commands_of_the_page()]
    assert {command[1] for command in commands if command[0] == "embrace-fx"} | {"bench"} == set(cli.main.commands)

    for name, *arguments in commands:
        if name == "embrace-fx":
            result = CliRunner().invoke(cli.main, arguments)
            assert result.exit_code == 0, (arguments, result.output)

    assert len(opened) == 1
    assert all((here / name).exists() for name in ("plan.html", "plan.json", "plan.svg"))


@pytest.mark.long
def test_the_commands_of_the_page_that_start_ranks_run(here: Path) -> None:
    with_files_of_the_page(here)
    commands = [shlex.split(each)[1:] for each in commands_of_the_page() if each.startswith("torchrun ")]
    assert [command[-1] for command in commands] == ["doctor", "ratings:make"]
    for arguments in commands:
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
