"""From what is kept to results: a row for every system of a block, floors, and how far the targets are met.

Ratios and exposed communication are taken within a round of one run, then their median.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.device.profile import profile_of
from benchmarks.lab.choice import CHOICE_TARGET, OWN, PREDICTION_TARGET, choice
from benchmarks.lab.device_targets import device_targets
from benchmarks.lab.floors import FLOOR_BATCHES, dependences_ms, floor, ideal, step_graph
from benchmarks.lab.kept import Kept, Opened, Round, versions
from benchmarks.lab.rounds import Rounds, Spread, Target, paired, perceived
from benchmarks.lab.settings import LARGER, REPLICAS, SHARDED, Block, Setting
from benchmarks.models import MODELS
from benchmarks.models.base import on_meta, sizes
from benchmarks.peers import SYSTEMS
from embrace_fx.passes.scheduler.link_bound import link_bound_ms

LIMIT_TARGET, ROWS_TARGET = 1.15, 1.05
REPLICAS_TARGET, SHARDED_TARGET = {"lm": 2.41}, {"lm": 1.5}
OTHER_REPLICAS_TARGET, OTHER_SHARDED_TARGET = 1.3, 1.2


@dataclass(frozen=True)
class Row:
    """One system of a block.

    Attributes:
        rounds: the number of measured rounds.
        step_ms: the time of a step, the median over ranks.
        ratio: the system's step time divided by that of `OWN` in the same round.
        exposed_ms: the system's step time minus that of `System.alone` in the same round.
        sent_bytes: bytes per step, of all ranks together.
        main_cpu_ms, other_cpu_ms: per step, a rank's processor time in the thread that computes and in all others.
        cores_busy: of the time of all cores, the part in which they ran anything, the kernel's work included.
        peak_bytes, added_bytes: largest memory of a rank, and how much of it came after the rank was ready.
        loss_difference: largest relative difference of its losses from those of the first system that communicates.
        notes: what the system itself decided, on rank 0.
        predicted: the step time that the system itself predicts, divided by the measured one.
        plan: parameter -> its strategy, where the system has one for each.
    """

    system: str
    rounds: int
    step_ms: Spread
    ratio: Spread | None
    exposed_ms: Spread | None
    sent_bytes: Spread
    main_cpu_ms: Spread
    other_cpu_ms: Spread
    cores_busy: Spread
    peak_bytes: Spread
    added_bytes: Spread
    first_step_s: float
    loss_difference: float | None
    notes: str
    predicted: Spread | None
    plan: Mapping[str, str]


def summarize(cells: Mapping[str, Rounds], openings: Mapping[str, Opened], shaped: bool) -> list[Row]:
    """Returns a row for every system with a measured round.

    Args:
        cells: system -> its rounds.
        shaped: whether each rank counts its own interface; otherwise all count the same one.
    """
    of_all = sum if shaped else median
    expected = next((openings[s].losses for s, rounds in cells.items() if rounds and SYSTEMS[s].alone), None)
    rows = []
    for system, rounds in cells.items():
        if not rounds:
            continue

        def spread(values: Callable[[Round], float], rounds: Rounds = rounds) -> Spread:
            found = Spread.of([float(values(each)) for each in rounds.values()])
            assert found is not None
            return found

        alone, opened = SYSTEMS[system].alone, openings[system]
        rows.append(
            Row(
                system,
                len(rounds),
                spread(lambda each: each.step_ms),
                paired(rounds, cells.get(OWN, {}), lambda own, other: own / other),
                paired(rounds, cells.get(alone, {}), lambda own, other: own - other) if alone else None,
                spread(lambda each: of_all([rank.sent_bytes for rank in each.ranks])),
                spread(lambda each: median(rank.main_cpu_ms for rank in each.ranks)),
                spread(lambda each: median(rank.other_cpu_ms for rank in each.ranks)),
                spread(lambda each: median(rank.cores_busy for rank in each.ranks)),
                spread(lambda each: max(rank.peak_bytes for rank in each.ranks)),
                spread(lambda each: max(rank.peak_bytes - rank.start_bytes for rank in each.ranks)),
                opened.first_step_s,
                _difference(opened.losses, expected) if alone and expected else None,
                opened.notes,
                _predicted(opened.predicted_ms, rounds),
                opened.plan,
            )
        )
    return rows


def _predicted(predicted_ms: float | None, rounds: Rounds) -> Spread | None:
    return Spread.of([predicted_ms / each.step_ms for each in rounds.values()]) if predicted_ms else None


def _difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False))  # of the steps that both have run


def results(setting: Setting, kept: Kept, asked: Setting | None = None) -> dict[str, Any]:
    """All that is known, for the JSON file, the page and the pictures.

    Args:
        asked: what is to be complete, of which `setting` may show more; None: all of it.
    """
    blocks = [_of_block(setting, kept, block) for block in setting.blocks()]
    asked = asked or setting
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "configuration": asdict(setting),
        "machine": machine(),
        "versions": versions(),
        "missing": [block.title for block in asked.blocks() if not _is_complete(asked, kept, block)],
        "targets": targets(setting, [block for block in blocks if block["rows"]]),
        "blocks": [block for block in blocks if block["rows"]],
    }


def _of_block(setting: Setting, kept: Kept, block: Block) -> dict[str, Any]:
    systems = setting.systems(block)
    cells = {s: found for s in systems if (found := kept.rounds(block, s))}
    about = {**block._asdict(), "title": block.title, "stem": block.stem}
    failures = {s: reason for s in systems if s not in cells and (reason := kept.failure(block, s))}
    if not cells:
        return {**about, "rows": [], "failures": failures}
    reached, timeline = kept.reached(block), kept.timeline(block)
    cells = {s: dict(perceived(rounds, block.stretched)) for s, rounds in cells.items()}
    openings = {s: kept.opening(block, s).perceived(block.stretched) for s in cells}
    rows = summarize(cells, openings, reached["shaped"])
    floors = _floors(setting, block, rows, reached, timeline)
    return {
        **about,
        "network": reached,
        "sizes": asdict(sizes(on_meta(MODELS[block.model][setting.size]))),
        "floors": floors,
        "rows": rows,
        "choice": choice(cells, {s: opening.plan for s, opening in openings.items()})
        if OWN in cells and any(system.startswith("forced_") for system in cells)
        else None,
        "failures": failures,
        "timeline": timeline,
        "rounds": {
            s: {r: {**each.conditions, "ranks": [asdict(rank) for rank in each.ranks]} for r, each in rounds.items()}
            for s, rounds in cells.items()
        },
    }


def _is_complete(setting: Setting, kept: Kept, block: Block) -> bool:
    rounds = setting.rounds_of(block)
    return all(len(kept.rounds(block, system)) >= rounds for system in setting.systems(block))


def _floors(
    setting: Setting, block: Block, rows: Sequence[Row], reached: Mapping[str, Any], figures: Mapping[str, Any]
) -> dict[str, Any]:
    """The floors, of which the limit is the largest that is known.

    `profiled_ms` is no floor of a step but of its order: what one link allows where transfers take as long as the
    system itself expects of these links, and compute as long as it measured.
    """
    cheapest = floor(MODELS[block.model][setting.size], block.ranks, range(FLOOR_BATCHES), setting.seed)
    compute_ms = (
        profile_of(block.model, setting.size).compute_ms
        if block.slow
        else min((row.step_ms.median for row in rows if not SYSTEMS[row.system].alone), default=None)
    )
    # These bounds assume one rank per host. Ranks on one host send to each other over another link.
    of_wire = reached["shaped"] and block.per_host == 1
    rate_mbit = max(reached["transfer_mbit"]) * block.stretched if of_wire else None
    steps = ideal(step_graph(figures["steps"]), compute_ms, rate_mbit) if figures and compute_ms and rate_mbit else None
    found = {
        "compute": compute_ms,
        "wire": cheapest.time_ms(rate_mbit) if rate_mbit else None,
        "dependences": dependences_ms(steps) if steps else None,
        "one_link": link_bound_ms(steps) if steps else None,
    }
    known = {name: value for name, value in found.items() if value is not None}
    limited_by = max(known, key=known.__getitem__) if known else None
    return {
        **{f"{name}_ms": value for name, value in found.items()},
        "profiled_ms": link_bound_ms(step_graph(figures["steps"])) / block.stretched if figures else None,
        **asdict(cheapest),
        "limited_by": limited_by,
        "limit_ms": known[limited_by] if limited_by else None,
    }


# -- targets -----------------------------------------------------------------------------------------------------------


def targets(setting: Setting, blocks: Sequence[Mapping[str, Any]]) -> list[Target]:
    """What was asked for: of emulated devices, see `device_targets`; else at the first number of ranks and rate.

    Scaling is over all numbers of ranks.
    """
    if setting.slow:
        return device_targets(setting, blocks)
    found = []
    for model in setting.models:
        here = [
            block
            for block in blocks
            if (block["model"], block["ranks"], block["rate_mbit"]) == (model, setting.ranks[0], setting.rates_mbit[0])
        ]
        found += [target for block in here for target in _of_group(block, model)]
        if here:
            found += _scaling(setting, model, blocks)
    return found + [target for block in blocks if block["choice"] for target in _of_choice(block)]


def _of_choice(block: Mapping[str, Any]) -> list[Target]:
    """Returns targets that compare the planner's choice with the best forced system, and its prediction with the
    measurement.
    """
    rows, made = {row.system: row for row in block["rows"]}, block["choice"]
    where = f"{block['model']}, {block['ranks']} ranks, {block['rate_mbit']:g} Mb/s"
    found = []
    if made.to_other:
        what = f"{' and '.join((OWN, *made.twins))} / best of another plan ({made.other})"
        found.append(Target(where, what, CHOICE_TARGET, True, made.to_other))
    if made.to_twin:
        found.append(Target(where, f"{OWN} / {made.twin}, the same plan", None, True, made.to_twin))
    if predicted := rows[OWN].predicted:
        off = sorted(abs(value - 1) for value in (predicted.min, predicted.median, predicted.max))
        found.append(
            Target(
                where,
                "prediction is off by",
                PREDICTION_TARGET,
                True,
                Spread(abs(predicted.median - 1), off[0], off[-1]),
            )
        )
    return found


def _of_group(block: Mapping[str, Any], model: str) -> list[Target]:
    rows = {row.system: row for row in block["rows"]}
    limit, found = block["floors"]["limit_ms"], []
    if OWN in rows and limit:
        own = rows[OWN].step_ms
        to_limit = Spread(own.median / limit, own.min / limit, own.max / limit)
        found.append(Target(model, f"step / limit, {block['group']}", LIMIT_TARGET, True, to_limit))
    for what, systems, wanted in (
        ("DDP and Horovod", REPLICAS, REPLICAS_TARGET.get(model, OTHER_REPLICAS_TARGET)),
        ("TorchRec, parameter server, Parallax", SHARDED, SHARDED_TARGET.get(model, OTHER_SHARDED_TARGET)),
    ):
        best = min((s for s in systems if s in rows), key=lambda s: rows[s].step_ms.median, default=None)
        if best:
            found.append(Target(model, f"best of {what} ({best}) / {OWN}", wanted, False, rows[best].ratio))
    if LARGER in rows:
        found.append(Target(model, "step with 10 x the rows / step", ROWS_TARGET, True, rows[LARGER].ratio))
    return found


def _scaling(setting: Setting, model: str, blocks: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Returns targets for the exposed communication with the most ranks minus that with the fewest, each of its first
    group.
    """
    exposed: dict[int, Spread] = {}
    for block in blocks:
        for row in block["rows"]:
            where = (block["model"], block["rate_mbit"], row.system)
            if where == (model, setting.rates_mbit[0], OWN) and row.exposed_ms:
                exposed.setdefault(block["ranks"], row.exposed_ms)
    most, fewest = max(exposed, default=0), min(exposed, default=0)
    if most == fewest:
        return []
    growth = exposed[most].median - exposed[fewest].median
    return [Target(model, f"exposed ms, {most} ranks less {fewest}", 0.0, True, Spread(growth, growth, growth))]


# -- data --------------------------------------------------------------------------------------------------------------


def machine() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({models[0] if models else platform.machine()}), {memory:.0f} GiB"


def as_data(found: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the results to types that JSON supports."""
    blocks = [
        {
            **block,
            "rows": [asdict(row) for row in block["rows"]],
            "choice": asdict(block["choice"]) if block["choice"] else None,
        }
        for block in found["blocks"]
    ]
    return {**found, "blocks": blocks, "targets": [{**asdict(t), "met": t.met} for t in found["targets"]]}
