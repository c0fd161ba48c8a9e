"""What the lab says of its measurements: pairs within rounds, floors, the page and the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from benchmarks.lab_cell import Measured
from benchmarks.lab_report import as_data, markdown, summarize, svg


def measured(step_ms: float, sent_bytes: float = 100.0, losses: Sequence[float] = (2.0, 1.0)) -> Measured:
    return Measured(1.5, step_ms, (step_ms,), sent_bytes, 300, 200, tuple(losses), "as it likes")


CELLS = {
    "alone_sparse": {0: (measured(10), measured(12)), 1: (measured(30), measured(30))},
    "ddp_sparse": {
        0: (measured(40, losses=(2.0, 1.0)), measured(42, losses=(4.0, 3.0))),
        1: (measured(90), measured(90)),
    },
    "embrace_2d": {0: (measured(20, losses=(3.0, 2.2)), measured(21, losses=(3.0, 2.2)))},
}


def test_ratios_and_exposed_time_are_taken_within_a_round() -> None:
    alone, ddp, embrace = summarize(CELLS, "embrace_2d", shaped=True)

    assert (ddp.step_ms.median, ddp.step_ms.min, ddp.step_ms.max) == (65.5, 41, 90)
    assert ddp.exposed_ms is not None
    assert (ddp.exposed_ms.min, ddp.exposed_ms.max) == (41 - 11, 90 - 30)
    assert ddp.ratio is not None
    assert ddp.ratio.min == ddp.ratio.max == pytest.approx(41 / 20.5)  # the one round that both have
    assert embrace.exposed_ms is not None
    assert embrace.exposed_ms.median == 20.5 - 11
    assert alone.exposed_ms is None


def test_bytes_of_hosts_are_added_and_those_of_a_shared_loopback_are_not() -> None:
    assert summarize(CELLS, "embrace_2d", shaped=True)[1].sent_bytes.median == 200
    assert summarize(CELLS, "embrace_2d", shaped=False)[1].sent_bytes.median == 100


def test_losses_are_compared_after_the_mean_over_ranks() -> None:
    alone, ddp, embrace = summarize(CELLS, "embrace_2d", shaped=True)

    assert alone.loss_difference is None  # it trains on its own batches alone
    assert ddp.loss_difference == 0
    assert embrace.loss_difference == pytest.approx(0.1)


def results(shaped: bool = True) -> dict[str, Any]:
    return {
        "date": "2026-01-02",
        "complete": False,
        "configuration": {
            "name": "quick",
            "ranks": 2,
            "rate_mbit": 200.0,
            "size": "tiny",
            "optimizer": "sgd",
            "warm_up_steps": 1,
            "steps": 2,
        },
        "network": {"shaped": shaped, "reason": "" if shaped else "found no tc", "transfer_mbit": [190.0, 191.0]},
        "machine": "2 cores",
        "versions": {"project": {"torch": "2.13.0"}},
        "models": {
            "lm": {
                "sizes": {"total_bytes": 2**21, "table_bytes": 2**20},
                "floor": {"bytes_per_rank": 1e6, "wire_ms": 40.0, "compute_ms": 20.5},
                "reference": "embrace_2d",
                "rows": summarize(CELLS, "embrace_2d", shaped),
                "failures": {"horovod": "it is not there"},
            }
        },
    }


def test_the_page_says_what_is_missing_and_which_losses_differ() -> None:
    page = markdown(results(), {"lm": "lm.svg"})

    assert "**Partial:**" in page
    assert "horovod did not run: it is not there" in page
    assert "| embrace_2d | 1 | 20 (20 to 20) | 1.00 (1.00 to 1.00) | 10 (10 to 10) |" in page
    assert "| **1e-01** |" in page
    assert "(50.0%). Floors: compute alone 20 ms; wire 40 ms (1.00 MB per rank)" in page
    assert "![lm: step times](lm.svg)" in page


def test_the_page_says_when_links_had_no_limit() -> None:
    assert "WITHOUT a limit, because: found no tc" in markdown(results(shaped=False), {})


def test_results_are_json() -> None:
    data = json.loads(json.dumps(as_data(results())))

    assert data["models"]["lm"]["rows"][1]["step_ms"] == {"median": 65.5, "min": 41, "max": 90}


def test_the_picture_is_well_formed_and_its_bars_add_up() -> None:
    found = results()["models"]["lm"]
    root = ET.fromstring(svg("lm", found, "a < b"))
    bars = [r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("height") == "20"]
    widths = [float(bar.get("width", "nan")) for bar in bars]

    assert len(bars) == 2 * len(CELLS)
    ddp, embrace = widths[2] + widths[3], widths[4] + widths[5]
    assert ddp / embrace == pytest.approx(65.5 / 20.5, rel=0.01)
    assert widths[5] / embrace == pytest.approx(9.5 / 20.5, rel=0.01)
