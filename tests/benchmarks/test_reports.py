"""What the benchmarks say of their measurements: pairs within rounds, floors, targets, pages, files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.exchanges.cases import Case, least_bytes
from benchmarks.exchanges.rank import as_data as cluster_as_data
from benchmarks.exchanges.report import markdown as exchanges_page
from benchmarks.exchanges.report import summarise
from benchmarks.lab import cuda
from benchmarks.lab.cuda_rank import CudaTurn
from benchmarks.lab.floors import all_gather_bytes, all_to_all_bytes, dependences_ms, ring_bytes, unique_rows
from benchmarks.lab.kept import Kept, Opened, Round
from benchmarks.lab.report import write
from benchmarks.lab.results import as_data, results, summarize
from benchmarks.lab.settings import SETTINGS, Block
from benchmarks.network import Links, Reached
from benchmarks.peers.base import Recorded
from benchmarks.records import read_record
from embrace_fx.cost.links import Cluster, Link
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph
from tests.support.emulated_cuda import Times
from tests.support.lab import measured


def turn(*step_ms: float, run: str = "one") -> Round:
    return Round({"run": run}, tuple(measured(each) for each in step_ms))


CELLS = {
    "alone_sparse": {0: turn(10, 12), 1: turn(30, 30)},
    "embrace_alone": {0: turn(12, 12), 1: turn(31, 31)},
    "ddp_sparse": {0: turn(40, 42), 1: turn(90, 90)},
    "embrace_2d": {0: turn(20, 21)},
}
LOSSES = {"alone_sparse": (9.0, 8.0), "embrace_alone": (9.0, 8.0), "ddp_sparse": (3.0, 2.0)}
OPENINGS = {system: Opened(1.5, LOSSES.get(system, (3.0, 2.2, 1.7)), "as it likes") for system in CELLS}


def test_ratios_are_taken_within_a_round_and_a_run() -> None:
    alone, _, ddp, embrace = summarize(CELLS, OPENINGS, shaped=True)

    assert asdict(ddp.step_ms) == {"median": 65.5, "min": 41, "max": 90}
    assert ddp.exposed_ms is not None
    assert ddp.ratio is not None
    assert embrace.exposed_ms is not None
    assert (ddp.exposed_ms.min, ddp.exposed_ms.max) == (41 - 11, 90 - 30)
    assert ddp.ratio.min == ddp.ratio.max == pytest.approx(41 / 20.5)  # the one round that both have
    assert embrace.exposed_ms.median == 20.5 - 12
    assert (alone.exposed_ms, alone.loss_difference) == (None, None)  # it trains on its own batches alone
    assert [ddp.loss_difference, embrace.loss_difference] == pytest.approx([0, 0.1])
    assert (ddp.sent_bytes.median, summarize(CELLS, OPENINGS, shaped=False)[2].sent_bytes.median) == (200, 100)
    later = {**CELLS, "embrace_2d": {0: turn(20, 21, run="another")}}
    assert [row.ratio for row in summarize(later, OPENINGS, shaped=True) if row.system == "ddp_sparse"] == [None]


SETTING = replace(SETTINGS["quick"], models=("lm",), groups={"pair": (*CELLS, "ddp")}, elsewhere=("pair",))
SETTING = replace(SETTING, ranks=(4, 2), rounds=2, size="tiny")
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
    found.recorded(FOUR, Recorded(figures, "<svg/>"))
    return found


def test_the_lab_writes_limits_targets_and_what_is_missing(kept: Kept, tmp_path: Path) -> None:
    found = results(SETTING, kept)
    four, two = found["blocks"]
    page = write(found, tmp_path / "results")

    assert four["floors"]["compute_ms"] == 20.5  # the faster of the two that compute alone
    assert four["floors"]["limit_ms"] == four["floors"]["dependences_ms"] == pytest.approx(20.5 + 8)
    assert (two["floors"]["wire_ms"], two["floors"]["limited_by"]) == (None, "compute")  # nothing limits it
    targets = {target.what: target for target in found["targets"]}
    faster = targets["best of DDP and Horovod (ddp_sparse) / embrace_2d"]
    assert faster.value is not None
    assert (faster.value.median, faster.wanted, faster.met) == (2.0, 2.41, False)
    text = page.read_text()
    for told in (
        "**Partial:** not every round of every system has been measured of lm, 4 ranks, 200 Mb/s, pair; lm, 2",
        "ddp did not run: it is not there",
        "| embrace_2d | 1 | 20 (20 to 20) | 0.72 | 1.00 (1.00 to 1.00) | 8 (8 to 8) | 8, 2 | 50% |",
        "| **1e-01** |",
        "WITHOUT a limit, because: found no tc",
        "Timeline of embrace_2d (profile): step 20 ms (predicted 20)",
    ):
        assert told in text
    assert read_record(page.with_suffix(".json.xz")) == json.loads(json.dumps(as_data(found)))
    assert {path.name for path in (page.parent / page.stem).iterdir()} == {"speedup.svg", "scaling.svg"}
    part = replace(SETTING, groups={"pair": ("embrace_2d",)}, ranks=(2,), rounds=1)
    assert results(SETTING, kept, part)["missing"] == []  # all that was asked for


def test_the_chosen_plan_is_compared_with_the_best_other_one(kept: Kept) -> None:
    """A forced strategy that has the chosen plan measures that plan once more."""
    block = Block("lm", 4, 200.0, "forced")
    plans = {"embrace_2d": {"t": "alltoall"}, "forced_alltoall": {"t": "alltoall"}, "forced_zen": {"t": "zen"}}
    kept.network(block, Reached(block.links, True, "", (191.0,)))
    for (system, plan), steps in zip(plans.items(), ((30.0, 24.0), (20.0, 20.0), (25.0, 20.0)), strict=True):
        kept.opened(block, system, Opened(1.5, (3.0,), "", steps[0] * 0.75, plan))
        for number, step_ms in enumerate(steps):
            kept.measured(block, system, number, {"run": "one"}, (measured(step_ms),))
    setting = replace(SETTINGS["strategies"], models=("lm",), ranks=(4,), rates_mbit=(200.0,), size="tiny")

    found = {target.what: target for target in results(setting, kept)["targets"]}

    chosen = found["embrace_2d and forced_alltoall / best of another plan (forced_zen)"].value
    assert chosen is not None
    assert asdict(chosen) == pytest.approx({"median": 1.05, "min": 1.0, "max": 1.1})


def test_emulated_devices_are_told_in_perceived_time_and_compared_at_every_k(tmp_path: Path) -> None:
    """Steps of 20 perceived ms, 25 without schedule, at k = 4 2 % more."""
    setting = replace(SETTINGS["device-quick"], models=("bert",), groups={"main": ("embrace_none", "embrace_2d")})
    setting = replace(setting, rounds=1, elsewhere=("main",), ranks=(2,), slow=(2.0, 4.0), size="tiny")
    kept = Kept(tmp_path)
    for block in setting.blocks():
        kept.network(block, Reached(block.links, True, "", (block.links.carried_mbit,)))
        for system, perceived_ms in (("embrace_none", 25.0), ("embrace_2d", 20.0)):
            kept.opened(block, system, Opened(1.0, (1.0,), "", perceived_ms * block.slow * 1.02))
            step_ms = perceived_ms * block.slow * (1.02 if block.slow == 4.0 else 1.0)
            kept.measured(block, system, 0, {"run": "one"}, (measured(step_ms),) * block.ranks)

    told = {(t.model, t.what): t.value.median for t in results(setting, kept)["targets"] if t.value}

    where, place = "bert, 2 ranks, wire / compute 1, k = 2", f"bert, 2 ranks, {setting.rate_mbit('bert', 0):g} Mb/s"
    assert told[place, "embrace_2d: perceived steps at k = 2 and 4 are apart by"] == pytest.approx(0.02, rel=0.05)
    assert told[where, "embrace_none / embrace_2d"] == pytest.approx(1.25)
    assert told[where, "prediction of embrace_2d is off by"] == pytest.approx(0.02)


def test_the_page_of_emulated_cuda_says_whose_time_a_step_is() -> None:
    def of(steps_ms: dict[float, float]) -> dict[str, Any]:
        rest = (20.0, 2.0, (0.0, 2.0, 0.0))
        turns = [asdict(CudaTurn(k, ms, *rest, ms / 2, ms / 4, 1e6, 100.0)) for k, ms in steps_ms.items()]
        return {"ranks": [{"turns": turns, "first_step_s": 1.0}] * 2, "findings": ""}

    systems = {"ddp": of({8.0: 320.0, 16.0: 640.0}), "ddp_sparse": {"failed": "RuntimeError: no"}}
    systems["embrace_2d"] = of({8.0: 100.0, 16.0: 160.0})
    about = {"date": "today", "machine": "a machine", "configuration": asdict(SETTINGS["device-cuda"])}

    page = cuda.markdown({**about, "times": asdict(Times()), "models": {"lm": systems}})

    for told in (
        "| ddp | 8 | 40.0 (40.0 to 40.0) | 20.0 | 0, 2, 0 | 0.2 | 50% | 25% | 1.00 | 100 |",
        "ddp_sparse did not run: RuntimeError: no",
        "`embrace_2d`: k = 8 and 16 differ by 25.0%: the host still counts.",
        "Over `embrace_2d`, each at its last k: ddp 4.00.",
    ):
        assert told in page


def test_the_cheapest_exchange_and_the_longest_cycle_by_hand() -> None:
    read = {"left": ("words", torch.tensor([5, 6, 5])), "right": ("words", torch.tensor([[6]]))}
    assert unique_rows(read) == {"words": 2}
    # AlltoAll, half a row being 8 bytes: rank 0 sends 3 half rows forward, 2 back and 2 ids; rank 1 2, 3 and 3 ids.
    assert all_to_all_bytes([2, 3], width=4) == max(3 * 8 + 2 * 8 + 2 * 8, 2 * 8 + 3 * 8 + 3 * 8)
    assert all_gather_bytes([2, 3], width=4) == 3 * (16 + 8)  # rank 1's rows, and their ids
    assert (ring_bytes(100, 2), ring_bytes(100, 4)) == (100, 150)
    assert dependences_ms(STEPS) == 3 + 1 + 99


def test_exchanges_are_compared_with_the_dense_one_of_their_round_and_with_the_least_bytes() -> None:
    cluster = Cluster(30e3, 0.4, (("all_reduce", Link(29e3, 0.5)),))
    setting: dict[str, Any] = {"command": "", "date": "today", "complete": True, "ranks": 2, "rate_mbit": 250.0}
    setting |= {"divisor": 100, "network": {"shaped": True, "reason": "", "transfer_mbit": [240.0, 240.0]}}
    setting |= {"cluster": json.loads(json.dumps(cluster_as_data(cluster))), "torch": "2", "python": "3", "cores": 2}
    cells = {
        (number, "blocks 0.01", system): {"seconds": [s] * 3, "sent_bytes": [30_000.0, 10_000.0], "cpu_s": [0.5, 0.1]}
        for system, of_rounds in (("allreduce", (2.0, 4.0)), ("ps", (1.0, 1.0)))
        for number, s in enumerate(of_rounds)
    }

    _, ps = rows = summarise(cells, setting)

    assert ps.to_dense is not None
    assert (ps.to_dense.min, ps.to_dense.max) == (2, 4)
    assert (ps.sent_bytes, ps.imbalance, ps.cpu_ms) == (20_000, 1.5, 300)
    assert ps.bytes_to_bound == 20_000 / least_bytes("ps", Case("blocks", 0.01, 100).sparsity(2))
    assert "**Partial:**" in exchanges_page(rows, {**setting, "complete": False})
