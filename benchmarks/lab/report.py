"""The lab's results as files: a page, every number as JSON, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab.choice import OWN
from benchmarks.lab.kept import write_whole
from benchmarks.lab.plots import pictures
from benchmarks.lab.results import Row, as_data
from benchmarks.lab.rounds import Target
from benchmarks.lab.settings import ABLATION, AUTO, INSIDE
from benchmarks.records import write_record

MIB = 2**20
NONE = "-"
FEW_TABLES = 4
LOSS_TOLERANCE = 1e-3
"""Largest relative difference of two systems' losses: they add gradients in other orders, and train few steps only."""


def write(found: Mapping[str, Any], folder: Path) -> Path:
    """Writes page, JSON and pictures, named by setting and date. Returns the page."""
    stem = f"lab-{found['configuration']['name']}-{found['date']}"
    drawn = pictures(found)
    folder.mkdir(parents=True, exist_ok=True)
    for name, picture in drawn.items():
        (folder / stem).mkdir(exist_ok=True)
        write_whole(folder / stem / name, picture)
    write_record(folder / stem, as_data(found))
    page = folder / f"{stem}.md"
    write_whole(page, markdown(found, {name: f"{stem}/{name}" for name in drawn}))
    return page


def markdown(found: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """Returns the results as a page in Markdown. `plots` maps the name of a picture to its file."""
    setting = found["configuration"]
    lines = [
        f"# Lab, {setting['name']}, {found['date']}",
        "",
        f"{_what(setting)}: models at size `{setting['size']}`, {setting['optimizer']}; systems take turns within a "
        f"round, a turn is one step that does not count and {setting['fewest_steps']} to {setting['most_steps']} that "
        f"do. {found['machine']}; {_versions(found['versions'])}. How to read this: README.md.",
    ]
    if found["missing"]:
        lines += ["", f"**Partial:** not every round of every system has been measured of {_list(found['missing'])}."]
    if found["targets"]:
        lines += ["", "## Targets", "", *_targets(found["targets"])]
    lines += [
        f"\n![{name.removesuffix('.svg')}]({plots[name]})"
        for name in ("speedup.svg", "scaling.svg", "ablation.svg")
        if name in plots
    ]
    for block in found["blocks"]:
        lines += ["", f"## {block['title']}", "", *_about(block), "", *_table(block["rows"], block["floors"])]
        if block["timeline"]:
            lines += ["", _timeline(block)]
        lines += [f"\n{system} did not run: {reason}" for system, reason in block["failures"].items()]
    return "\n".join(lines) + "\n"


def _what(setting: Mapping[str, Any]) -> str:
    if not setting["slow"]:
        return "Measured"
    motions = ", ".join(f"{slow:g}" for slow in setting["slow"])
    motions += f", of {', '.join(setting['slower'])} twice that" if setting["slower"] else ""
    return (
        f"**Emulated device, k = {motions}.** Compute takes the time of a "
        "profile recorded on one core, in a rank that sleeps; device and links are k times slower than they are said "
        "to be; steps and rates are perceived ones, what was measured over k and times k; processor time is as "
        "measured. Measured"
    )


def _versions(versions: Mapping[str, Mapping[str, str]]) -> str:
    return "; ".join(
        f"{environment}: " + ", ".join(f"{package} {version}" for package, version in packages.items())
        for environment, packages in versions.items()
    )


def _list(titles: Sequence[str], most: int = 4) -> str:
    shown = "; ".join(titles[:most])
    return shown if len(titles) <= most else f"{shown} and {len(titles) - most} more"


def _targets(targets: Sequence[Target]) -> list[str]:
    lines = ["| model | figure | wanted | found | met |", "|---|---|---|---|---|"]
    for target in targets:
        value = target.value.text(2) if target.value else "not measured"
        met = NONE if target.met is None else "yes" if target.met else "**no**"
        wanted = NONE if target.wanted is None else f"{'at most' if target.at_most else 'at least'} {target.wanted:g}"
        lines.append(f"| {target.model} | {target.what} | {wanted} | {value} | {met} |")
    return lines


def _about(block: Mapping[str, Any]) -> list[str]:
    size, floors, network = block["sizes"], block["floors"], block["network"]
    hosts = (
        f"Each rank on a host of its own (network namespaces), {block['rate_mbit']:g} Mb/s each way"
        if block["per_host"] == 1
        else f"{block['per_host']} ranks on each host (network namespaces), {block['rate_mbit']:g} Mb/s each way for "
        f"each of them between hosts and {INSIDE:g} times as much inside"
    )
    limited = (
        f"{hosts}; a bare transfer reaches {median(network['transfer_mbit']) * (block['slow'] or 1):.0f} Mb/s."
        if network["shaped"]
        else f"On the loopback interface WITHOUT a limit, because: {network['reason']}"
    )
    share = size["table_bytes"] / size["total_bytes"]
    return [
        f"{limited} {size['total_bytes'] / MIB:,.1f} MiB of parameters, {size['table_bytes'] / MIB:,.1f} of them "
        f"tables ({share:.1%}). Floors: compute alone {_ms(floors['compute_ms'])}; wire {_ms(floors['wire_ms'])} "
        f"({floors['bytes_per_rank'] / 1e6:,.2f} MB per rank); dependences {_ms(floors['dependences_ms'])}, "
        f"and where one link carries all transfers {_ms(floors['one_link_ms'])}. Limit {_ms(floors['limit_ms'])} "
        f"({floors['limited_by'].replace('_', ' ') if floors['limited_by'] else 'not known'}). With transfers and "
        f"compute as {OWN} profiled them, one link allows {_ms(floors['profiled_ms'])}."
    ]


def _ms(value: float | None) -> str:
    return "not known" if value is None else f"{value:,.0f} ms"


def _table(rows: Sequence[Row], floors: Mapping[str, Any]) -> list[str]:
    limit = floors["limit_ms"]
    lines = [
        f"| system | rounds | step ms | step / limit | step / {OWN} | exposed ms | CPU ms: main, other "
        "| cores busy | predicted / step | sent MB | peak MiB (added) | first step s | loss differs |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.system} | {row.rounds} | {row.step_ms.text()} | "
        f"{f'{row.step_ms.median / limit:.2f}' if limit else NONE} "
        f"| {row.ratio.text(2) if row.ratio else NONE} "
        f"| {row.exposed_ms.text() if row.exposed_ms else NONE} "
        f"| {row.main_cpu_ms.median:,.0f}, {row.other_cpu_ms.median:,.0f} "
        f"| {row.cores_busy.median:.0%} "
        f"| {f'{row.predicted.median:.2f}' if row.predicted else NONE} | {row.sent_bytes.median / 1e6:,.2f} "
        f"| {row.peak_bytes.median / MIB:,.0f} ({row.added_bytes.median / MIB:,.0f}) "
        f"| {row.first_step_s:.1f} | {_agreement(row.loss_difference)} |"
        for row in rows
    ]
    ablation = {row.system: row for row in rows if row.system in ABLATION}
    if len(ablation) == len(ABLATION):
        first = ablation[ABLATION[0]].step_ms.median
        gains = [f"{name.removeprefix('embrace_')} {first / ablation[name].step_ms.median:.2f}" for name in ABLATION]
        lines += ["", f"Ablation, times as fast as the hybrid alone: {', '.join(gains)}."]
        if decided := [row.step_ms.median for row in rows if row.system == AUTO]:
            fastest = min(row.step_ms.median for row in ablation.values())
            lines += ["", f"A step of the schedule that is decided takes {decided[0] / fastest:.2f} of the fastest's."]
    plan = next((row.plan for row in rows if row.system == OWN), {})
    return [*lines, "", f"What {OWN} chose: {_chosen(plan)}."] if plan else lines


def _chosen(plan: Mapping[str, str]) -> str:
    """Lists the strategies of a plan, each with its tables: a few by name. Other parameters are only counted."""
    found = []
    for strategy in dict.fromkeys(plan.values()):
        names = [name for name, of_name in plan.items() if of_name == strategy]
        tables = [name for name in names if name.startswith("tables.")]
        having = tables if len(tables) <= FEW_TABLES else [f"{len(tables)} tables"]
        if len(names) > len(tables):
            having.append(f"{len(names) - len(tables)} that are no tables")
        found.append(f"{strategy} for {' and '.join(having)}")
    return "; ".join(found)


def _timeline(block: Mapping[str, Any]) -> str:
    measured, predicted = block["timeline"]["measured"], block["timeline"]["predicted"]
    slow = block["slow"] or 1.0
    waits = ", ".join(f"{lane} {value / slow:,.1f} ms" for lane, value in measured["exposed_ms"].items())
    return (
        f"Timeline of {OWN} ({block['timeline']['source']}): step {measured['step_ms'] / slow:,.0f} ms "
        f"(predicted {predicted['step_ms'] / slow:,.0f}), compute {measured['compute_ms'] / slow:,.0f} (predicted "
        f"{predicted['compute_ms'] / slow:,.0f}), waits for {waits}."
    )


def _agreement(difference: float | None) -> str:
    if difference is None:
        return NONE
    return f"{difference:.0e}" if difference <= LOSS_TOLERANCE else f"**{difference:.0e}**"
