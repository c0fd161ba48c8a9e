"""The planner's choice beside what was forced: in the lab's results, and in two of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab.choice import compared, latest
from benchmarks.lab.kept import Kept, Opened
from benchmarks.lab.report import markdown
from benchmarks.lab.results import as_data, results
from benchmarks.lab.settings import FORCED, SETTINGS, Block
from benchmarks.network import Links, Reached
from tests.support.lab import measured

ZEN, SHARDED = {"tables.a": "zen, balanced", "bias": "allreduce"}, {"tables.a": "alltoall", "bias": "allreduce"}


def of_choice(
    folder: Path, steps_ms: Mapping[str, tuple[float, ...]], plans: Mapping[str, dict[str, str]]
) -> dict[str, Any]:
    """What is said of a block of forced strategies; predictions are three quarters of the first round."""
    kept, block = Kept(folder), Block("lm", 4, 200.0, FORCED)
    kept.network(block, Reached(Links(4, 200.0), True, "", (191.0,)))
    for system, rounds_ms in steps_ms.items():
        kept.opened(block, system, Opened(1.5, (3.0,), "as it likes", rounds_ms[0] * 0.75, plans[system]))
        for number, step_ms in enumerate(rounds_ms):
            kept.measured(block, system, number, {"run": "one"}, (measured(step_ms),))
    setting = replace(SETTINGS["strategies"], models=("lm",), ranks=(4,), rates_mbit=(200.0,), size="tiny")
    return results(setting, kept)


def test_the_choice_is_compared_with_the_best_that_was_forced(tmp_path: Path) -> None:
    steps_ms = {"embrace_2d": (21.0,), "forced_zen": (20.0,), "forced_ps": (50.0,)}
    plans = {"embrace_2d": SHARDED, "forced_zen": ZEN, "forced_ps": {"tables.a": "ps", "bias": "ps"}}

    found = of_choice(tmp_path, steps_ms, plans)

    chosen, prediction = [t for t in found["targets"] if t.model == "lm, 4 ranks, 200 Mb/s"]
    assert chosen.what == "embrace_2d / best of another plan (forced_zen)"
    assert chosen.value is not None
    assert chosen.value.median == pytest.approx(1.05)
    assert prediction.value is not None
    assert prediction.value.median == pytest.approx(0.25)
    assert not prediction.met
    page = markdown(found, {})
    assert "| 0.75 |" in page
    assert "What embrace_2d chose: alltoall for tables.a; allreduce for 1 that are no tables." in page


def test_a_forced_strategy_with_the_chosen_plan_measures_that_plan_again(tmp_path: Path) -> None:
    steps_ms = {"embrace_2d": (30.0, 24.0), "forced_alltoall": (20.0, 20.0), "forced_zen": (25.0, 20.0)}
    plans = {"embrace_2d": SHARDED, "forced_alltoall": SHARDED, "forced_zen": ZEN}

    found = of_choice(tmp_path, steps_ms, plans)

    chosen, twin, _ = [t for t in found["targets"] if t.model == "lm, 4 ranks, 200 Mb/s"]
    assert chosen.what == "embrace_2d and forced_alltoall / best of another plan (forced_zen)"
    assert chosen.value is not None
    assert asdict(chosen.value) == pytest.approx({"median": 1.05, "min": 1.0, "max": 1.1})
    assert twin.what == "embrace_2d / forced_alltoall, the same plan"
    assert twin.value is not None
    assert asdict(twin.value) == pytest.approx({"median": 1.35, "min": 1.2, "max": 1.5})
    assert twin.met is None
    assert "| embrace_2d / forced_alltoall, the same plan | - | 1.35 (1.20 to 1.50) | - |" in markdown(found, {})
    json.dumps(as_data(found))


PS = {"tables.a": "ps", "bias": "allreduce"}
PLANS = {"embrace_2d": SHARDED, "forced_zen": ZEN, "forced_ps": PS}


def last_line(tmp_path: Path, *files: tuple[dict[str, float], dict[str, dict[str, str]]]) -> str:
    """Of what is said of two files with one round each: (steps in ms, plans)."""
    written = []
    for number, (steps_ms, plans) in enumerate(files):
        found = of_choice(tmp_path / str(number), {system: (ms,) for system, ms in steps_ms.items()}, plans)
        written.append(tmp_path / f"{number}.json")
        written[-1].write_text(json.dumps(as_data(found)))
    return compared(*written).splitlines()[-1]


def test_the_fastest_other_plan_of_one_measurement_is_looked_at_in_the_other(tmp_path: Path) -> None:
    first = {"embrace_2d": 22.0, "forced_zen": 20.0, "forced_ps": 22.0}
    second = {"embrace_2d": 22.0, "forced_zen": 22.0, "forced_ps": 20.0}

    line = last_line(tmp_path, (first, PLANS), (second, PLANS))

    assert line == "| lm, 4 ranks, 200 Mb/s | forced_zen | 1.10 | forced_ps | 1.10 | 1.00 | yes |"


def test_one_that_is_faster_in_both_is(tmp_path: Path) -> None:
    steps_ms = {"embrace_2d": 22.0, "forced_zen": 20.0, "forced_ps": 30.0}

    line = last_line(tmp_path, (steps_ms, PLANS), (steps_ms, PLANS))

    assert line == "| lm, 4 ranks, 200 Mb/s | forced_zen | 1.10 | forced_zen | 1.10 | 1.10 | **no** |"


def test_where_another_plan_was_chosen_the_second_file_counts(tmp_path: Path) -> None:
    steps_ms = {"embrace_2d": 22.0, "forced_zen": 20.0, "forced_ps": 30.0}

    line = last_line(tmp_path, (steps_ms, PLANS), (steps_ms, {**PLANS, "embrace_2d": ZEN}))

    assert line == ("| lm, 4 ranks, 200 Mb/s | forced_zen | 1.10 | forced_ps | 0.70 | another plan was chosen | yes |")


def test_of_several_files_the_last_one_that_has_a_setting_counts(tmp_path: Path) -> None:
    """Predictions are three quarters of the first round: of two rounds 1.12 times, their median."""
    files = []
    for number, (own_ms, zen_ms) in enumerate([((20.0, 20.0), 18.0), ((20.0, 10.0), 30.0)]):
        steps_ms = {"embrace_2d": own_ms, "forced_zen": (zen_ms,), "forced_ps": (40.0,)}
        found = of_choice(tmp_path / str(number), steps_ms, PLANS)
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(as_data(found)))

    first, both = latest(files[:1]).splitlines(), latest(files).splitlines()

    assert first[-3] == "| lm, 4 ranks, 200 Mb/s | 1 | forced_zen | 1.11 | **no** | 0.75 | **no** |"
    assert first[-1] == "At most 1.05 times: 0 of 1; predicted within 20%: 0 of 1."
    assert both[-3] == "| lm, 4 ranks, 200 Mb/s | 2 | forced_zen | 0.67 | yes | 1.12 | yes |"
    assert both[-1] == "At most 1.05 times: 1 of 1; predicted within 20%: 1 of 1."
