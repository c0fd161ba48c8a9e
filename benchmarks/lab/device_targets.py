"""How far the targets of emulated devices are met, and whether the slow motion was slow enough.

A figure is valid where k and 2 k agree: then the processors' own time no longer counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.lab.choice import OWN
from benchmarks.lab.rounds import Spread, Target
from benchmarks.lab.settings import ABLATION, LARGER, REPLICAS, SHARDED, Setting

AGREES = 0.03
"""How far the perceived steps of two slow motions may be apart."""
MOSTLY_TABLES = ("lm", "recommender")
DEPENDENCES, WIRE = 1.05, 1.12
LM_RANKS, LM_RATIO, LM_REPLICAS, LM_SHARDED, OTHERS = 16, 2.0, 2.41, 1.8, 1.3
ABLATION_OF_TABLES, ABLATION_OF_OTHERS = 1.15, 1.08
EFFICIENCY, SCALED = 0.9, (2, 16)
PREDICTED, CHOICE, ROWS = 0.05, 1.03, 1.02
PREDICTED_STRATEGY = 0.15

Blocks = Sequence[Mapping[str, Any]]


def device_targets(setting: Setting, blocks: Blocks) -> list[Target]:
    """Whether slow motions agree, then each target, of the slowest motion where several were measured."""
    found = list(_agreement(blocks))
    for model in setting.models:
        for ratio in setting.ratios:
            rate = setting.rate_mbit(model, len(setting.rates_mbit) + setting.ratios.index(ratio))
            for ranks in setting.ranks:
                at = [b for b in blocks if (b["model"], b["rate_mbit"], b["ranks"]) == (model, rate, ranks)]
                slowest = max((b["slow"] for b in at), default=0.0)
                for block in at:
                    if block["slow"] == slowest:
                        found += _of_block(block, f"{model}, {ranks} ranks, wire / compute {ratio:g}", ratio)
    return found + list(_scaling(setting, blocks))


def _rows(block: Mapping[str, Any]) -> dict[str, Any]:
    return {row.system: row for row in block["rows"]}


def _agreement(blocks: Blocks) -> Iterator[Target]:
    """Of each system that was measured at several k: how far the perceived steps are apart."""
    motions: dict[tuple[Any, ...], dict[float, Mapping[str, Any]]] = {}
    for block in blocks:
        where = (block["model"], block["ranks"], block["rate_mbit"], block["group"])
        motions.setdefault(where, {})[block["slow"]] = block
    for (model, ranks, *_), by_slow in motions.items():
        for less, more in pairwise(sorted(by_slow)):
            faster, slower = _rows(by_slow[less]), _rows(by_slow[more])
            for system in [name for name in faster if name in slower]:
                apart = abs(faster[system].step_ms.median / slower[system].step_ms.median - 1)
                what = f"{system}: perceived steps at k = {less:g} and {more:g} are apart by"
                yield Target(f"{model}, {ranks} ranks", what, AGREES, True, Spread(apart, apart, apart))


def _of_block(block: Mapping[str, Any], where: str, ratio: float) -> Iterator[Target]:
    rows, floors = _rows(block), block["floors"]
    own, model, ranks = rows.get(OWN), block["model"], block["ranks"]
    if own is None:
        return
    if block["group"] == "main":
        yield from _to_floors(own, floors, where)
        none = rows.get(ABLATION[0])
        if none is not None and none.ratio is not None:
            wanted = ABLATION_OF_TABLES if model in MOSTLY_TABLES else ABLATION_OF_OTHERS
            yield Target(where, f"{ABLATION[0]} / {OWN}", wanted, False, none.ratio)
    at_target = (ranks, ratio) == ((LM_RANKS, LM_RATIO) if model == "lm" else (8, 1.0))
    for names, of_lm in ((REPLICAS, LM_REPLICAS), (SHARDED, LM_SHARDED)):
        best = min((rows[s] for s in names if s in rows), key=lambda row: row.step_ms.median, default=None)
        if best is not None and best.ratio is not None:
            wanted = (of_lm if model == "lm" else OTHERS) if at_target else None
            yield Target(where, f"best of {', '.join(s for s in names if s in rows)} ({best.system}) / {OWN}",
                         wanted, False, best.ratio)  # fmt: skip
            yield Target(where, f"of which its bytes allow at most ({best.system})", None, False,
                         _allowed(best, block))  # fmt: skip
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


def _to_floors(own: Any, floors: Mapping[str, Any], where: str) -> Iterator[Target]:
    step, dependences = own.step_ms, floors["dependences_ms"]
    bounds = [floors[name] for name in ("compute_ms", "wire_ms") if floors[name]]
    for what, floor, wanted in (
        ("dependence limit", dependences, DEPENDENCES),
        ("max(compute, wire)", max(bounds, default=None), WIRE),
    ):
        if floor:
            over = Spread(step.median / floor, step.min / floor, step.max / floor)
            yield Target(where, f"{OWN} / {what}", wanted, True, over)


def _allowed(row: Any, block: Mapping[str, Any]) -> Spread | None:
    """A step that hides nothing takes its compute and its bytes one after the other: over the limit of any step."""
    floors = block["floors"]
    if not floors["limit_ms"] or not block["network"]["shaped"]:
        return None
    sent_ms = row.sent_bytes.median / block["ranks"] * 8 / 1e3 / block["rate_mbit"]
    allowed = (floors["compute_ms"] + sent_ms) / floors["limit_ms"]
    return Spread(allowed, allowed, allowed)


def _scaling(setting: Setting, blocks: Blocks) -> Iterator[Target]:
    """Examples per second and rank with the most ranks, over those with the fewest."""
    few, many = SCALED
    for model in setting.models:
        for ratio in setting.ratios:
            rate = setting.rate_mbit(model, len(setting.rates_mbit) + setting.ratios.index(ratio))
            steps = {
                block["ranks"]: _rows(block)[OWN].step_ms.median
                for block in blocks
                if (block["model"], block["rate_mbit"], block["group"]) == (model, rate, "main") and OWN in _rows(block)
            }
            if few in steps and many in steps:
                value = steps[few] / steps[many]
                wanted = EFFICIENCY if model in MOSTLY_TABLES and ratio == 1.0 else None
                what = f"efficiency of {OWN} from {few} to {many} ranks"
                yield Target(f"{model}, wire / compute {ratio:g}", what, wanted, False, Spread(value, value, value))
