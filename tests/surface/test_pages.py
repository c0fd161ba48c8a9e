"""The site is built without a warning; what its pages show runs."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from embrace_fx import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES_OF_SCRIPTS = ("first-model.md", "reading.md", "command-line.md")
"""Whose snippets are programs, not fragments."""


def test_the_site_is_built_without_warnings_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="of the extra `dev`")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert {path.stem for path in (tmp_path / "site").glob("*.html")} == pages | {"404"}
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert "dense gradients are reduced and applied until" in re.sub(r"\s+", " ", reference)
    assert not re.findall(r'(?:src|href)="https?://(?!squidfunk|www\.mkdocs)', reference)  # it opens without a network


@pytest.mark.parametrize("page", PAGES_OF_SCRIPTS)
def test_what_a_page_shows_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    snippets = re.findall(r"```python[^\n]*\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert snippets
    torch.manual_seed(0)
    logger = logging.getLogger("embrace_fx")
    level = logger.level
    try:
        for snippet in snippets:
            exec(compile(snippet, page, "exec"), {"__name__": "__page__"})
    finally:
        logger.setLevel(level)


def test_the_command_line_page_has_every_command() -> None:

    text = (DOCS / "command-line.md").read_text(encoding="utf-8")
    for name in cli.main.commands:
        assert f"## {name}" in text
        assert re.search(rf"(embrace-fx|embrace_fx.cli) {name}", text)
