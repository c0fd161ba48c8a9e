"""What the sections found, as JSON, as a page with tables, and as a picture of the emulated steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.records import write_record

Rows = Sequence[Mapping[str, Any]]
WIDTH, BAR, GAP, LABEL = 760, 16, 4, 300


def write(results: Mapping[str, Any], output: Path, stem: str) -> None:
    write_record(output / stem, results)
    drawn = svg(results)
    if drawn:
        (output / f"{stem}.svg").write_text(drawn)
    (output / f"{stem}.md").write_text(page(results, f"{stem}.svg" if drawn else None))


def page(results: Mapping[str, Any], picture: str | None) -> str:
    lines = [f"# One GPU, {results['date']}", ""]
    if results["dry_run"]:
        lines += ["**Dry run on a CPU at tiny sizes: it shows that the code runs. No time here means anything.**", ""]
    lines += [f"`python -m benchmarks.gpu {results['command']}`: {results['seconds']:.0f} s.", ""]
    for name, found in results["sections"].items():
        lines += [f"## {name}: {found['outcome']}, {found['seconds']:.0f} s", ""]
        if name == "fabric":
            lines += [
                "**Emulated**: one real rank of N; compute is real, a collective occupies the link for the time that "
                "the cost model gives it. Other ranks are exactly like this one and never late.",
                "",
            ]
            lines += [f"![Emulated steps]({picture})", ""] if picture else []
        for kind in dict.fromkeys(row["kind"] for row in found["rows"]):
            lines += [*_table([row for row in found["rows"] if row["kind"] == kind], kind), ""]
        if found["error"]:
            lines += ["```", found["error"].rstrip(), "```", ""]
    return "\n".join(lines)


def _table(rows: Rows, kind: str) -> list[str]:
    columns = [column for column in dict.fromkeys(key for row in rows for key in row) if column != "kind"]
    return [
        f"| {kind}: " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
        *("| " + " | ".join(_text(row.get(column)) for column in columns) + " |" for row in rows),
    ]


def _text(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "**no**"
        case float():
            return f"{value:,.4g}"
        case list():
            return ", ".join(map(_text, value))
        case dict():
            return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    return str(value).replace("|", "/").replace("\n", " ")


def svg(results: Mapping[str, Any]) -> str:
    """Draws bars of the emulated steps: the time without the link, and the time that communication adds. Returns "" if
    there are none.
    """
    found = results["sections"].get("fabric", {"rows": []})
    rows = [row for row in found["rows"] if row["kind"] == "step"]
    if not rows:
        return ""
    scale = (WIDTH - LABEL - 80) / max(row["ms"] for row in rows)
    height = 40 + len(rows) * (BAR + GAP)
    note = "dry run, times mean nothing; " if results["dry_run"] else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="20">EMULATED step, ms ({note}blue: link takes no time, orange: exposed)</text>',
    ]
    for k, row in enumerate(rows):
        y = 32 + k * (BAR + GAP)
        label = f"{row['ranks']} ranks, {row['gigabits']} Gb/s, {row['system']}"
        free = min(row["free_ms"], row["ms"]) * scale
        parts += [
            f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{free:.1f}" height="{BAR}" fill="#4878b0"/>',
            f'<rect x="{LABEL + free:.1f}" y="{y}" width="{max(row["ms"] * scale - free, 0):.1f}" height="{BAR}" '
            'fill="#e08a3c"/>',
            f'<text x="{LABEL + row["ms"] * scale + 4:.1f}" y="{y + 12}">{row["ms"]:.2f}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"
