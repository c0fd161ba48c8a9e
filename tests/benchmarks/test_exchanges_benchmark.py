"""The benchmark of the exchanges: its gradients, its bounds, its page; and one cell on real hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

from benchmarks.exchanges.__main__ import fingerprint, read
from benchmarks.exchanges.cases import CASES, LSTM_DENSITY, SYSTEMS, Case, least_bytes, picked, zipf_ids
from benchmarks.exchanges.rank import as_data, cluster_of
from benchmarks.exchanges.report import markdown, summarise, svg
from benchmarks.namespaces import obstacle
from benchmarks.records import read_record
from embrace_fx.cost.links import Cluster, Link
from embrace_fx.cost.sparsity import measure
from embrace_fx.runtime.exchanges.hashing import server_of

RANKS = 8
SLOW = Cluster(30e3, 0.4, (("all_reduce", Link(29e3, 0.5)),))
LSTM_WORDS = 793_470


@pytest.mark.parametrize("case", [case for case in CASES if case.density <= 0.1], ids=lambda case: case.name)
def test_ranks_have_the_density_of_their_case(case: Case) -> None:
    counts = [case.ids(rank).numel() for rank in range(3)]

    assert fmean(counts) == pytest.approx(case.density * case.num_units, rel=0.05)
    assert not torch.equal(case.ids(0), case.ids(1))
    assert torch.equal(case.ids(0), case.ids(0))


def test_hashing_balances_the_words_that_even_ranges_do_not() -> None:
    """Zen, OSDI 2025: imbalance ratios of push and pull below 1.1, where the first of 8 ranges has most words; at the
    size of the LSTM's vocabulary, for of few ids some server always has a few more.
    """
    ids = [zipf_ids(LSTM_WORDS, LSTM_DENSITY, torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
    sparsity = measure(ids, LSTM_WORDS, 1, 4)
    assert min(sparsity.push_imbalance, sparsity.pull_imbalance) > 3

    for seed in range(3):
        for sent in (*ids, torch.cat(ids), torch.cat(ids).unique()):  # each rank's push, all of them, and the pull
            load = torch.bincount(server_of(sent, RANKS, seed), minlength=RANKS).double()
            assert load.max() / load.mean() < 1.1


def test_least_bytes_of_two_ranks() -> None:
    sparsity = measure([torch.tensor([0, 1]), torch.tensor([1, 2, 3])], num_units=10, width=2, itemsize=4)

    assert {name: least_bytes(name, sparsity) for name in SYSTEMS} == {
        "allreduce": 80,
        "allgather": 2.5 * 8,
        "omnireduce": (2.5 + 4) * 8 / 2,
        "zen_balanced": (2.5 + 4) * 8 / 2,
        "zen_hierarchical": 2.5 * 8,
        "ps": (2.5 + 4) * 8 / 2,
    }


@pytest.mark.parametrize(("density", "dense"), [(1.0, True), (0.01, False)])
def test_the_planner_picks_for_a_replica(density: float, dense: bool) -> None:
    case = Case("blocks", density, divisor=100)
    choice = picked(case, [case.ids(rank) for rank in range(4)], SLOW)

    assert (choice == "allreduce") == dense
    assert choice in SYSTEMS


def test_a_cluster_is_kept() -> None:
    assert cluster_of(json.loads(json.dumps(as_data(SLOW)))) == SLOW


# -- results -----------------------------------------------------------------------------------------------------------

CONFIGURATION: dict[str, Any] = {
    "command": "python -m benchmarks.exchanges",
    "date": "2026-01-01",
    "complete": True,
    "ranks": 2,
    "rate_mbit": 250.0,
    "divisor": 100,
    "network": {"shaped": True, "reason": "", "transfer_mbit": [240.0, 240.0]},
    "cluster": as_data(SLOW),
    "torch": "2",
    "python": "3",
    "cores": 2,
}


def cell(round_: int, system: str, seconds: float) -> dict[str, Any]:
    sent, cpu = [30_000.0, 10_000.0], [0.5, 0.1]
    return {"round": round_, "case": "blocks 0.01", "system": system, "seconds": [seconds] * 3, "sent_bytes": sent} | {
        "cpu_s": cpu
    }


def test_ratios_are_taken_within_a_round() -> None:
    measured = [cell(0, "allreduce", 2.0), cell(1, "allreduce", 4.0), cell(0, "ps", 1.0), cell(1, "ps", 1.0)]
    rows = summarise({(c["round"], c["case"], c["system"]): c for c in measured}, CONFIGURATION)

    dense, ps = rows
    assert dense.to_dense is not None
    assert ps.to_dense is not None
    assert (dense.to_dense.min, dense.to_dense.max) == (1, 1)
    assert (ps.to_dense.min, ps.to_dense.max) == (2, 4)
    assert (ps.sent_bytes, ps.imbalance, ps.cpu_ms) == (20_000, 1.5, 300)
    bound = least_bytes("ps", Case("blocks", 0.01, 100).sparsity(2))
    assert ps.bytes_to_bound == 20_000 / bound
    assert ps.ms_to_bound == pytest.approx(1000 / (bound / 30_000))

    page = markdown(rows, CONFIGURATION, "a.svg")
    assert "| blocks 0.01 | 1.00 | **3.00** |" in page or "| blocks 0.01 | 1.00 | 3.00 |" in page
    assert "Partial" not in page
    assert "**Partial:**" in markdown(rows, {**CONFIGURATION, "complete": False})
    picture = ET.fromstring(svg(rows, CONFIGURATION))
    assert len(picture.findall("{http://www.w3.org/2000/svg}circle")) == 2


def test_what_was_measured_with_another_setting_does_not_count() -> None:
    assert fingerprint({"ranks": 2}) == fingerprint({"ranks": 2})
    assert fingerprint({"ranks": 2}) != fingerprint({"ranks": 4})


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
@pytest.mark.long
def test_a_small_run_on_hosts(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "benchmarks.exchanges", "--ranks", "2", "--divisor", "64", "--rounds", "1"]
    command += ["--cases", "blocks 0.01", "--output", str(tmp_path), "--kept", str(tmp_path / "kept")]
    subprocess.run(command, check=True, cwd=root, timeout=280)

    (data,) = [read_record(file) for file in tmp_path.glob("exchanges-*.json.xz")]
    assert [row["system"] for row in data["rows"]] == list(SYSTEMS)
    for row in data["rows"]:
        assert 1.0 <= row["bytes_to_bound"] < 1.25 + 0.1 * (row["system"] == "omnireduce")
    (kept,) = (tmp_path / "kept").iterdir()
    assert len(read(kept)["cells"]) == len(SYSTEMS)
