"""What the lab says of its measurements: pairs within rounds, floors, targets, the page and the pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.lab.kept import Kept, Opened, Round
from benchmarks.lab.plots import Group, grouped_bars, pictures, step_times
from benchmarks.lab.report import markdown, write
from benchmarks.lab.results import as_data, results, summarize
from benchmarks.lab.settings import SETTINGS, Block
from benchmarks.network import Links, Reached
from benchmarks.peers.base import Recorded
from benchmarks.records import read_record
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph
from tests.support.lab import measured

RECTANGLE = "{http://www.w3.org/2000/svg}rect"


def turn(*step_ms: float, run: str = "one") -> Round:
    return Round({"run": run}, tuple(measured(each) for each in step_ms))


def opened(*losses: float) -> Opened:
    return Opened(1.5, losses, "as it likes")


CELLS = {
    "alone_sparse": {0: turn(10, 12), 1: turn(30, 30)},
    "embrace_alone": {0: turn(12, 12), 1: turn(31, 31)},
    "ddp_sparse": {0: turn(40, 42), 1: turn(90, 90)},
    "embrace_2d": {0: turn(20, 21)},
}
OPENINGS = {
    "alone_sparse": opened(9.0, 8.0),
    "embrace_alone": opened(9.0, 8.0),
    "ddp_sparse": opened(3.0, 2.0),
    "embrace_2d": opened(3.0, 2.2, 1.7),
}


def test_ratios_and_exposed_time_are_taken_within_a_round() -> None:
    alone, _, ddp, embrace = summarize(CELLS, OPENINGS, shaped=True)

    assert (ddp.step_ms.median, ddp.step_ms.min, ddp.step_ms.max) == (65.5, 41, 90)
    assert ddp.exposed_ms is not None
    assert (ddp.exposed_ms.min, ddp.exposed_ms.max) == (41 - 11, 90 - 30)
    assert ddp.ratio is not None
    assert ddp.ratio.min == ddp.ratio.max == pytest.approx(41 / 20.5)  # the one round that both have
    assert embrace.exposed_ms is not None
    assert embrace.exposed_ms.median == 20.5 - 12
    assert alone.exposed_ms is None


def test_rounds_of_two_runs_are_not_compared() -> None:
    later = {**CELLS, "embrace_2d": {0: turn(20, 21, run="another")}}

    found = {row.system: row for row in summarize(later, OPENINGS, shaped=True)}

    assert found["ddp_sparse"].ratio is None
    assert found["embrace_2d"].exposed_ms is None
    assert found["embrace_2d"].step_ms.median == 20.5


def test_bytes_of_hosts_are_added_and_those_of_a_shared_loopback_are_not() -> None:
    assert summarize(CELLS, OPENINGS, shaped=True)[2].sent_bytes.median == 200
    assert summarize(CELLS, OPENINGS, shaped=False)[2].sent_bytes.median == 100


def test_losses_are_compared_over_the_steps_that_both_have() -> None:
    alone, _, ddp, embrace = summarize(CELLS, OPENINGS, shaped=True)

    assert alone.loss_difference is None  # it trains on its own batches alone
    assert ddp.loss_difference == 0
    assert embrace.loss_difference == pytest.approx(0.1)


SETTING = replace(
    SETTINGS["quick"],
    name="test",
    models=("lm",),
    groups={"pair": (*CELLS, "ddp", "embrace_2d_rows10")},
    elsewhere=("pair",),
    ranks=(4, 2),
    rounds=2,
    size="tiny",
)
FOUR, TWO = Block("lm", 4, 200.0, "pair"), Block("lm", 2, 200.0, "pair")


STEPS = StepGraph(
    (
        Operation("backward", "backward", "compute", 3.0),
        Operation("forward", "forward", "compute", 1.0),
        Operation("reduce", "all_reduce", "dense", 99.0, sent_bytes=191_000),  # 8 ms at 191 Mb/s
    ),
    (Dependence("backward", "reduce"), Dependence("reduce", "forward")),
    ("backward", "forward"),
)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    """Two blocks; the second one's network has no limit."""
    found = Kept(tmp_path)
    for block, reason in ((FOUR, ""), (TWO, "found no tc")):
        found.network(block, Reached(Links(block.ranks, 200.0), not reason, reason, (190.0, 191.0)))
        for system, rounds in CELLS.items():
            found.opened(block, system, OPENINGS[system])
            for number, each in rounds.items():
                found.measured(block, system, number, each.conditions, each.ranks)
    found.failed(FOUR, "ddp", "it is not there")
    diagnostics = {"step_ms": 20.0, "compute_ms": 11.0, "exposed_ms": {"dense": 7.0}}
    figures = {"measured": diagnostics, "predicted": diagnostics, "source": "profile", "steps": asdict(STEPS)}
    found.recorded(FOUR, Recorded(figures, "<svg xmlns='http://www.w3.org/2000/svg'/>"))
    return found


def test_what_is_kept_comes_back(kept: Kept) -> None:
    assert kept.rounds(FOUR, "ddp_sparse") == CELLS["ddp_sparse"]
    assert kept.opening(FOUR, "embrace_2d") == OPENINGS["embrace_2d"]
    assert kept.has(FOUR, "ddp_sparse", 1)
    assert not kept.has(FOUR, "embrace_2d", 1)
    assert kept.rounds(FOUR, "embrace_2d_rows10") == {}


def test_the_limit_is_the_largest_floor_that_is_known(kept: Kept) -> None:
    four, two = results(SETTING, kept)["blocks"]

    assert four["floors"]["compute_ms"] == 20.5  # the faster of the two that compute alone
    assert four["floors"]["dependences_ms"] == pytest.approx(20.5 + 8)
    floors = [four["floors"][f"{name}_ms"] for name in ("wire", "dependences", "one_link")]
    assert four["floors"]["limit_ms"] == max(floors)
    assert two["floors"]["wire_ms"] is None  # nothing limits it
    assert two["floors"]["limit_ms"] == 20.5
    assert two["floors"]["limited_by"] == "compute"


def test_targets_say_which_are_met(kept: Kept) -> None:
    found = {target.what: target for target in results(SETTING, kept)["targets"]}

    faster = found["best of DDP and Horovod (ddp_sparse) / embrace_2d"]
    assert faster.value is not None
    assert (faster.value.median, faster.wanted, faster.met) == (2.0, 2.41, False)
    assert found["step / limit, pair"].value is not None
    assert found["step / limit, pair"].value.median == pytest.approx(20.5 / 28.5)
    assert "step with 10 x the rows / step" not in found  # it has not been measured
    assert found["exposed ms, 4 ranks less 2"].met  # both are the same numbers


def test_the_page_says_what_is_missing_and_which_losses_differ(kept: Kept) -> None:
    page = markdown(
        results(SETTING, kept), {"lm-4-200-pair.svg": "there/lm.svg", "lm-4-200-pair-timeline.svg": "there/t.svg"}
    )

    assert (
        "**Partial:** not every round of every system has been measured of lm, 4 ranks, 200 Mb/s, pair; lm, 2" in page
    )
    assert "ddp did not run: it is not there" in page
    assert "| embrace_2d | 1 | 20 (20 to 20) | 0.72 | 1.00 (1.00 to 1.00) | 8 (8 to 8) | 8, 2 | 50% |" in page
    assert "| **1e-01** |" in page
    assert "dependences 28 ms, and where one link carries all transfers 28 ms. Limit 28 ms (dependences)." in page
    assert "WITHOUT a limit, because: found no tc" in page
    assert "![lm, 4 ranks, 200 Mb/s, pair: step times](there/lm.svg)" in page
    assert "Timeline of embrace_2d (profile): step 20 ms (predicted 20)" in page


def test_files_are_written_and_the_data_is_json(kept: Kept, tmp_path: Path) -> None:
    found = results(SETTING, kept)
    page = write(found, tmp_path / "results")

    data = read_record(page.with_suffix(".json.xz"))
    assert data == json.loads(json.dumps(as_data(found)))
    assert data["blocks"][0]["rows"][2]["step_ms"] == {"median": 65.5, "min": 41, "max": 90}
    assert data["blocks"][0]["rounds"]["ddp_sparse"]["1"]["ranks"][0]["step_ms"] == 90
    for name in pictures(found):
        ET.fromstring((page.parent / page.stem / name).read_text())
    assert set(pictures(found)) == {
        "lm-4-200-pair.svg", "lm-4-200-pair-timeline.svg", "lm-2-200-pair.svg", "speedup.svg", "scaling.svg",
    }  # fmt: skip


def test_the_bars_of_a_block_add_up(kept: Kept) -> None:
    block = results(SETTING, kept)["blocks"][0]
    widths = bar_widths(step_times({**block, "title": "a < b"}), "20")

    assert len(widths) == 2 * len(CELLS)
    ddp, embrace = widths[4] + widths[5], widths[6] + widths[7]
    assert ddp / embrace == pytest.approx(65.5 / 20.5, rel=0.01)
    assert widths[7] / embrace == pytest.approx(8.5 / 20.5, rel=0.01)


def test_grouped_bars_are_as_long_as_their_values() -> None:
    groups = [Group("a", (("x", 2.0), ("y", 1.0))), Group("b", (("y", 4.0),))]

    widths = bar_widths(grouped_bars("title", "under it", groups), "17")

    assert [width / widths[1] for width in widths] == pytest.approx([2.0, 1.0, 4.0], rel=0.01)


def bar_widths(picture: str, height: str) -> Sequence[float]:
    found = ET.fromstring(picture).iter(RECTANGLE)
    return [float(bar.get("width", "nan")) for bar in found if bar.get("height") == height]
