"""The tables of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.memory.cells import Cell

Found = Mapping[str, Mapping[str, Any]]

COUNTS = (
    *("model", "system", "budget", "counted MiB", "of everything", "predicted MiB", "of the budget", "predicted time"),
    *("run again", "offloaded", "same bits"),
)
TIMES = ("model", "system", "budget", "counted MiB", "ms", "over eager", "over no budget", "predicted")
PREDICTIONS = ("model", "how", "budget", "peak GiB", "predicted time", "run again", "offloaded")


def table(wanted: Sequence[Cell], known: Found) -> str:
    """Returns a Markdown table. Budgets are shares of the memory that embrace_fx predicts without a budget, times are
    relative to that step.
    """
    return "\n".join([*_head(COUNTS), *(_counted(cell, known) for cell in wanted), *_times(wanted, known)]) + "\n"


def predictions(known: Found) -> str:
    """Returns a Markdown table. Times are relative to the step without a budget for the same batch."""
    lines = []
    for key, found in known.items():
        model, how, *budget = key.split(" | ")
        first = [model, how, *(budget or [f"{found['examples']} examples fit" if "examples" in found else ""])]
        if "error" in found:
            lines.append(_line([*first, _reason(found), "", "", ""]))
            continue
        time = f"{found['time']:.3f}" if "time" in found else ""
        copies = [str(found.get(each, "")) for each in ("run_again", "offloaded")]
        lines.append(_line([*first, f"{found['peak_bytes'] / 2**30:.2f}", time, *copies]))
    return "\n".join([*_head(PREDICTIONS), *lines]) + "\n"


def _reason(found: Mapping[str, Any]) -> str:
    """Returns a short reason why there are no figures: the smallest memory of a step, if the error names it."""
    least = re.search(r"needs at least ([\d,]+) bytes", found["error"])
    return f"at least {_mib(int(least[1].replace(',', '')))} MiB are needed" if least else str(found["error"])


def _counted(cell: Cell, known: Found) -> str:
    found = known[cell.key]
    first = [cell.model, cell.system, "" if cell.budget is None else str(cell.budget)]
    if "error" in found:
        return _line([*first, _reason(found), *[""] * (len(COUNTS) - 4)])
    everything, base = (known[Cell(cell.model, each).key] for each in ("everything", "embrace_fx"))
    limit = found.get("limit_bytes")
    return _line(
        [
            *first,
            _mib(found["counted_bytes"]),
            f"{found['counted_bytes'] / everything['counted_bytes']:.2f}" if "error" not in everything else "",
            _mib(found.get("predicted_bytes")),
            f"{found['counted_bytes'] / limit:.3f}" if limit else "",
            _over(found, base, "predicted_ms") if "predicted_ms" in found else "",
            str(found.get("run_again", "")),
            str(found.get("offloaded", "")),
            "yes" if found["same_bits"] else "no",
        ]
    )


def _times(wanted: Sequence[Cell], known: Found) -> Iterator[str]:
    """Yields the measured times, for cells that have been measured."""
    timed = [(cell, known.get(f"{cell.model} | times", {})) for cell in wanted]
    if not any(found for _, found in timed):
        return
    yield from ("", *_head(TIMES))
    for cell, found in timed:
        if cell.key not in found:
            continue
        ms, counted = found[cell.key], known[cell.key]
        eager, base = (Cell(cell.model, system).key for system in ("everything", "embrace_fx"))
        predicted = _over(counted, known[base], "predicted_ms") if "predicted_ms" in counted else ""
        first = [cell.model, cell.system, str(cell.budget or ""), _mib(counted["counted_bytes"]), f"{ms:.0f}"]
        yield _line([*first, _over(found, found, cell.key, eager), _over(found, found, cell.key, base), predicted])


def _over(found: Mapping[str, Any], others: Mapping[str, Any], key: str, other: str = "") -> str:
    """Returns the ratio of two figures as text."""
    return f"{found[key] / others[other or key]:.3f}"


def _head(columns: Sequence[str]) -> list[str]:
    return [_line(columns), "|" + "---|" * len(columns)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _mib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:.1f}"
