"""The notebook runs on one process, and shows its report and pictures."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_steps.ipynb"


def run_cells(cells: list[str]) -> list[Any]:
    """Executes the cells in order. Returns the value of each cell's last expression, or None if it has none."""
    names: dict[str, Any] = {"__name__": "__notebook__"}
    values: list[Any] = []
    for source in cells:
        tree, value = ast.parse(source), None
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, NOTEBOOK.name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
        values.append(value)
    return values


def test_the_notebook_runs_and_shows_report_and_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))

    values = run_cells(["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"])

    shown = [value._repr_html_() for value in values if hasattr(value, "_repr_html_")]
    assert len(shown) == 3
    assert "users.weight" in shown[0]
    assert all("<svg" in picture for picture in shown[1:])
    assert "alltoall" in capsys.readouterr().out
    assert (tmp_path / "schedule.html").exists()
