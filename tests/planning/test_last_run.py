"""Plans from run to run, on links that a busy machine measures as it likes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from embrace_fx.cost.links import Cluster
from embrace_fx.planning.last_run import CONFIRMED_BY, as_last_run
from embrace_fx.setup.disk_cache import VARIABLE
from embrace_fx.vocabulary.plan import Decision, Plan

CLEARLY = 0.8
KEY = ("a model", 2)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))


def decide(links: Cluster, current: Plan | None, rows: float = 1.0) -> Plan:
    """Shards take 1 ms for each row, the whole table the time of its bytes; a tie at links of 1000 bytes per ms."""
    ms = {"alltoall": rows, "allreduce": 1000 / links.bandwidth_bytes_per_ms}
    best = min(ms, key=lambda name: ms[name])
    if current is not None and ms[best] > CLEARLY * ms[current["table"].strategy]:
        best = current["table"].strategy
    return Plan(2, (Decision("table", (8, 8), True, best, "", 0, 0, ms[best]),), (), (), links, "probed")


def run(bandwidth: float, rows: float = 1.0) -> str:
    plan = as_last_run(KEY, Cluster(bandwidth, 0.1), lambda links, current: decide(links, current, rows))
    return plan["table"].strategy


def test_a_noisy_probe_changes_no_plan() -> None:
    """Rates spread over a factor of three about the tie: without a memory every other run has another plan."""
    noise = random.Random(3)
    rates = [1000 * 3 ** noise.uniform(-0.5, 0.5) for _ in range(12)]
    alone = {decide(Cluster(rate, 0.1), None)["table"].strategy for rate in rates}

    assert alone == {"alltoall", "allreduce"}
    assert {run(rate) for rate in [900.0, *rates]} == {"alltoall"}


def test_another_network_is_believed_after_a_few_runs() -> None:
    assert run(500.0) == "alltoall"
    assert [run(9000.0) for _ in range(CONFIRMED_BY)] == ["alltoall"] * (CONFIRMED_BY - 1) + ["allreduce"]
    assert run(500.0) == "allreduce", "and back in as many"


def test_a_run_between_starts_the_count_anew() -> None:
    assert run(500.0) == "alltoall"
    for rate in (9000.0, 9000.0, 500.0, 9000.0, 9000.0):
        assert run(rate) == "alltoall"


def test_another_batch_is_believed_at_once() -> None:
    """It was measured exactly: what noise there is lies in the links."""
    assert run(500.0) == "alltoall"
    assert run(500.0, rows=40.0) == "allreduce"


def test_nothing_is_kept_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    assert [run(rate) for rate in (500.0, 9000.0, 500.0)] == ["alltoall", "allreduce", "alltoall"]
