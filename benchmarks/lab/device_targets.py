"""How far the targets of emulated devices are met, and whether the slow motion was slow enough.

A figure is valid where k and 2 k agree: then the processors' own time no longer counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.lab.choice import OWN
from benchmarks.lab.rounds import Spread, Target
from benchmarks.lab.settings import ABLATION, CHOSEN, LARGER, REPLICAS, SHARDED, Setting

AGREES = 0.03
"""How far the perceived steps of two slow motions may be apart."""
MOSTLY_TABLES = ("lm", "recommender")
RANKS, RATIO = 8, 1.0
DEPENDENCES, WIRE = 1.05, 1.12
LM_RANKS, LM_RATIO, LM_REPLICAS, LM_SHARDED, OTHERS = 16, 2.0, 2.41, 1.8, 1.3
ABLATION_OF_TABLES, ABLATION_OF_OTHERS = 1.15, 1.08
EFFICIENCY, SCALED = 0.9, (2, 16)
PREDICTED, CHOICE, ROWS = 0.05, 1.03, 1.02
PREDICTED_STRATEGY = 0.15
WHOLE = ("main", "few", "scaling", CHOSEN)
"""Groups whose `OWN` is compared with its floors; in the others it is beside the systems of the group alone."""

Blocks = Sequence[Mapping[str, Any]]


def device_targets(setting: Setting, blocks: Blocks) -> list[Target]:
    """Returns whether different slowdowns agree, and then each target at each slowdown."""
    found = list(_agreement(blocks))
    ratios = _ratios(setting)
    beside: dict[tuple[str, str, int, float | None], list[Mapping[str, Any]]] = {}
    for block in blocks:
        ratio = ratios.get((block["model"], block["rate_mbit"]))
        rate = f"wire / compute {ratio:g}" if ratio else f"{block['rate_mbit']:g} Mb/s"
        shared = f", {block['per_host']} per host" if block["per_host"] > 1 else ""
        where = f"{block['model']}, {block['ranks']} ranks{shared}, {rate}, k = {block['slow']:g}"
        found += _of_block(block, where, at_target=(block["ranks"], ratio) == (RANKS, RATIO))
        beside.setdefault((where, block["model"], block["ranks"], ratio), []).append(block)
    found += [target for place, groups in beside.items() for target in _beside_others(*place, groups)]
    return found + list(_scaling(ratios, blocks))


def _ratios(setting: Setting) -> dict[tuple[str, float], float]:
    """Returns (model, perceived rate) -> time of communication divided by time of compute."""
    first = len(setting.rates_mbit)
    return {
        (model, setting.rate_mbit(model, first + number)): ratio
        for model in setting.models
        for number, ratio in enumerate(setting.ratios)
    }


def _rows(block: Mapping[str, Any]) -> dict[str, Any]:
    return {row.system: row for row in block["rows"]}


def _agreement(blocks: Blocks) -> Iterator[Target]:
    """Yields, for each system that was measured at several slowdowns, how much its perceived step times differ."""
    motions: dict[tuple[Any, ...], dict[float, dict[str, Any]]] = {}
    for block in [block for block in blocks if block["per_host"] == 1]:
        by_slow = motions.setdefault((block["model"], block["ranks"], block["rate_mbit"]), {})
        by_slow[block["slow"]] = {**_rows(block), **by_slow.get(block["slow"], {})}
    for (model, ranks, rate_mbit), by_slow in motions.items():
        for less, more in pairwise(sorted(by_slow)):
            faster, slower = by_slow[less], by_slow[more]
            for system in [name for name in faster if name in slower]:
                apart = abs(faster[system].step_ms.median / slower[system].step_ms.median - 1)
                what = f"{system}: perceived steps at k = {less:g} and {more:g} are apart by"
                where = f"{model}, {ranks} ranks, {rate_mbit:g} Mb/s"
                yield Target(where, what, AGREES, True, Spread(apart, apart, apart))


def _of_block(block: Mapping[str, Any], where: str, at_target: bool) -> Iterator[Target]:
    """Yields the targets of a block. With `at_target`, those for floors and ablation must be met; otherwise they are
    only shown.
    """
    rows, floors = _rows(block), block["floors"]
    own, model = rows.get(OWN), block["model"]
    if own is None:
        return
    if block["group"] in WHOLE:
        yield from _to_floors(own, floors, where, at_target)
        none = rows.get(ABLATION[0])
        if none is not None and none.ratio is not None:
            wanted = ABLATION_OF_TABLES if model in MOSTLY_TABLES else ABLATION_OF_OTHERS
            yield Target(where, f"{ABLATION[0]} / {OWN}", wanted if at_target else None, False, none.ratio)
    for system, row in rows.items():
        if row.predicted is not None and system in (*ABLATION, *(s for s in rows if s.startswith("forced_"))):
            off = sorted(abs(value - 1) for value in (row.predicted.min, row.predicted.max))
            wanted = PREDICTED if system in ABLATION else PREDICTED_STRATEGY
            spread = Spread(abs(row.predicted.median - 1), *off)
            yield Target(where, f"prediction of {system} is off by", wanted, True, spread)
    if block["choice"] and block["choice"].to_other:
        yield Target(where, f"auto / best of another plan ({block['choice'].other})", CHOICE, True,
                     block["choice"].to_other)  # fmt: skip
    if LARGER in rows and rows[LARGER].ratio:
        yield Target(where, "step with 10 x the rows / step", ROWS, True, rows[LARGER].ratio)


def _beside_others(where: str, model: str, ranks: int, ratio: float | None, blocks: Blocks) -> Iterator[Target]:
    """Yields the best of the other systems for one model and network, relative to the steps of `OWN` measured in the
    same rounds.
    """
    at_target = (ranks, ratio) == ((LM_RANKS, LM_RATIO) if model == "lm" else (RANKS, RATIO))
    for names, of_lm in ((REPLICAS, LM_REPLICAS), (SHARDED, LM_SHARDED)):
        others = [(row, block) for block in blocks for row in block["rows"] if row.system in names and row.ratio]
        if others:
            best, block = min(others, key=lambda each: each[0].ratio.median)
            least = (of_lm if model == "lm" else OTHERS) if at_target else None
            measured = ", ".join(name for name in names if any(row.system == name for row, _ in others))
            yield Target(where, f"best of {measured} ({best.system}) / {OWN}", least, False, best.ratio)
            yield Target(where, f"of which its bytes allow at most ({best.system})", None, False,
                         _allowed(best, block))  # fmt: skip


def _to_floors(own: Any, floors: Mapping[str, Any], where: str, at_target: bool) -> Iterator[Target]:
    step, dependences = own.step_ms, floors["dependences_ms"]
    bounds = [floors[name] for name in ("compute_ms", "wire_ms") if floors[name]]
    for what, floor, wanted in (
        ("dependence limit", dependences, DEPENDENCES),
        ("limit of dependences on one link", floors["one_link_ms"], None),
        ("the same with transfers and compute as profiled", floors["profiled_ms"], None),
        ("max(compute, wire)", max(bounds, default=None), WIRE),
    ):
        if floor:
            over = Spread(step.median / floor, step.min / floor, step.max / floor)
            yield Target(where, f"{OWN} / {what}", wanted if at_target else None, True, over)


def _allowed(row: Any, block: Mapping[str, Any]) -> Spread | None:
    """A step that hides nothing takes its compute and its bytes one after the other: over the limit of any step."""
    floors = block["floors"]
    if not floors["limit_ms"] or not block["network"]["shaped"]:
        return None
    sent_ms = row.sent_bytes.median / block["ranks"] * 8 / 1e3 / block["rate_mbit"]
    allowed = (floors["compute_ms"] + sent_ms) / floors["limit_ms"]
    return Spread(allowed, allowed, allowed)


def _scaling(ratios: Mapping[tuple[str, float], float], blocks: Blocks) -> Iterator[Target]:
    """Examples per second and rank with the most ranks, over those with the fewest, each in the slowest motion."""
    steps: dict[tuple[str, float], dict[int, tuple[float, float, float]]] = {}
    for block in blocks:
        if OWN in _rows(block) and block["per_host"] == 1 and block["floors"]["limit_ms"]:
            of_ranks = steps.setdefault((block["model"], block["rate_mbit"]), {})
            found = (block["slow"], _rows(block)[OWN].step_ms.median, block["floors"]["limit_ms"])
            kept = of_ranks.get(block["ranks"], found)
            of_ranks[block["ranks"]] = found if found[0] > kept[0] else kept
    few, many = SCALED
    for (model, rate_mbit), of_ranks in steps.items():
        if few in of_ranks and many in of_ranks:
            (slow, *of_few), (slower, *of_many) = of_ranks[few], of_ranks[many]
            wanted = EFFICIENCY if model in MOSTLY_TABLES and ratios.get((model, rate_mbit)) == RATIO else None
            where = f"{model}, {rate_mbit:g} Mb/s"
            measured, allowed = (a / b for a, b in zip(of_few, of_many, strict=True))
            for what, value, least in (
                (f"efficiency of {OWN} from {few} (k = {slow:g}) to {many} ranks (k = {slower:g})", measured, wanted),
                ("of which the limits of both allow", allowed, None),
            ):
                yield Target(where, what, least, False, Spread(value, value, value))
