"""A file is one subject, which can be read in one sitting."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("embrace_fx", "passes", "runtime", "tests", "benchmarks", "examples")
MOST_LINES = 500


def test_no_source_file_is_longer_than_500_lines() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lines) > 500
    assert {file: count for file, count in lines.items() if count > MOST_LINES} == {}
