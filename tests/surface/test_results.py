"""Results are few and whole; every command and every result that a page or a comment names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def test_results_are_few_whole_and_of_devices_that_were_there() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2e6
    assert [path.name for path in files if re.search("partial|h100|3090", path.name, re.IGNORECASE)] == []
    pages = [path for path in files if path.suffix == ".md" and path.name != "README.md"]
    assert [path.name for path in pages if "**Partial:**" in path.read_text(encoding="utf-8")] == []


def test_every_command_and_every_result_that_is_named_is_there() -> None:
    sources = [path for room in ("embrace_fx", "passes", "runtime") for path in (ROOT / room).rglob("*.py")]
    named = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "Makefile", *RESULTS.glob("*.md"), *sources]
    gone = []
    for path in named:
        text = path.read_text(encoding="utf-8")
        for module in re.findall(r"-m (benchmarks(?:\.\w+)+)", text):
            place = ROOT / module.replace(".", "/")
            gone += [module] if not (place.with_suffix(".py").exists() or (place / "__main__.py").exists()) else []
        links = re.findall(r"\]\(((?:\.\./)*benchmarks/results/[^)#]+)\)", text)
        links += re.findall(r"\]\((?!https?:)([^)#]+)\)", text) if path.parent == RESULTS else []
        gone += [link for link in links if not (path.parent / link).exists()]
    assert gone == []
