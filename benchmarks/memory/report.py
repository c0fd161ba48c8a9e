"""The table of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.memory.cells import Cell

COLUMNS = (
    *("model", "system", "budget", "resident MiB", "of everything", "counted MiB", "predicted MiB", "ms", "over none"),
    *("nodes again", "offloaded"),
)


def table(wanted: Sequence[Cell], known: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown. Shares are of saving everything in eager mode; times over embrace_fx without a budget, or eager."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for cell in wanted:
        found = known[cell.key]
        first = f"| {cell.model} | {cell.system} | {cell.budget if cell.budget is not None else ''} "
        if "error" in found:
            lines.append(f"{first}| {found['error']} |" + " |" * 7)
            continue
        everything = known[Cell(cell.model, "everything").key]
        base = known[Cell(cell.model, "embrace_fx" if cell.system == "embrace_fx" else "everything").key]
        cells = [
            _mib(found["resident_bytes"]),
            f"{found['resident_bytes'] / everything['resident_bytes']:.2f}" if "error" not in everything else "",
            _mib(found.get("counted_bytes")),
            _mib(found.get("predicted_bytes")),
            f"{found['median_ms']:.0f}",
            f"{found['median_ms'] / base['median_ms']:.2f}" if "error" not in base else "",
            str(found.get("run_again", "")),
            str(found.get("offloaded", "")),
        ]
        lines.append(first + "".join(f"| {each} " for each in cells) + "|")
    return "\n".join(lines) + "\n"


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:.1f}"
