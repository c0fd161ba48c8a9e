"""The lab end to end, at tiny sizes: its models, systems on real ranks, runs that go on where they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.device.emulated import Emulated
from benchmarks.lab import __main__ as lab
from benchmarks.lab.hosts import ROOT
from benchmarks.lab.kept import Kept
from benchmarks.lab.results import results
from benchmarks.lab.settings import SETTINGS, Setting
from benchmarks.models import MODELS
from benchmarks.models.base import Workload, on_meta, sizes
from benchmarks.peers import SYSTEMS
from tests.support.lab import LEARNING_RATES, means, reference_losses, train
from tests.support.ranks import run_ranks

RANKS, PATIENCE_S = 2, 60.0
TINY = replace(SETTINGS["quick"], models=("bert",), groups={"pair": ("alone_sparse", "ddp_sparse")}, size="tiny")
TINY = replace(TINY, ranks=(RANKS,), rates_mbit=(500.0,), rounds=2, turn_ms=5.0)
PUBLISHED_MIB = {"lm": (3186.5, 3099.5), "gnmt": (739.1, 252.5), "transformer": (1067.5, 263.4), "bert": (417.7, 89.4)}
"""Whole model and its tables, of EmbRace (Li et al. 2022)."""

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.mark.parametrize("model", PUBLISHED_MIB)
def test_a_model_has_its_published_size_and_the_labs_form_of_it_the_same_share_of_tables(model: str) -> None:
    paper, (total_mib, tables_mib) = sizes(on_meta(MODELS[model]["paper"])), PUBLISHED_MIB[model]
    assert (paper.total_bytes, paper.table_bytes) == pytest.approx((total_mib * 2**20, tables_mib * 2**20), rel=0.02)
    assert sizes(on_meta(MODELS[model]["lab"])).table_share == pytest.approx(tables_mib / total_mib, abs=0.03)


@pytest.mark.parametrize("model", MODELS)
def test_a_batch_is_a_pure_function_of_its_place(model: str) -> None:
    places = ((3, 1, 0), (3, 1, 0), (3, 2, 0))
    first, again, other = (torch.cat([*map(torch.flatten, MODELS[model]["tiny"].batch(*place))]) for place in places)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("optimizer", LEARNING_RATES)
@pytest.mark.parametrize("emulated", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("model", ["lm", *(pytest.param(m, marks=pytest.mark.long) for m in MODELS if m != "lm")])
def test_systems_train_as_one_process_unless_they_are_alone(model: str, emulated: bool, optimizer: str) -> None:
    """SGD shows a gradient that is added and not averaged, Adagrad an update that is made twice for a row."""
    plain = MODELS[model]["tiny"]
    workload: Workload = Emulated(model, "tiny", plain, 0.05) if emulated else plain
    expected = reference_losses(workload, optimizer, RANKS)
    names = [name for name, system in SYSTEMS.items() if system.environment == "project" and name != "ddp_compiled"]
    for name in ("ddp", "ddp_sparse", "embrace_2d", "alone_sparse") if emulated or model == "lm" else names:
        found = means(run_ranks(RANKS, train, name, workload, optimizer))
        assert (found == pytest.approx(expected, rel=1e-4)) == bool(SYSTEMS[name].alone), name


def children(pid: int) -> list[int]:
    """Of a process, those that run ranks of the lab."""
    found = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return list(filter(is_rank, found))


def is_rank(pid: int) -> bool:
    file = Path(f"/proc/{pid}/cmdline")
    return file.exists() and b"benchmarks.lab.rank" in file.read_bytes()  # of one that has ended it is empty


@pytest.mark.long
@pytest.mark.parametrize(
    "setting", [TINY, replace(SETTINGS["device-quick"], models=("bert",), size="tiny")], ids=["cores", "device"]
)
def test_a_run_goes_on_where_it_was_and_an_environment_that_is_missing_is_told_of(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SYSTEMS, "ddp", replace(SYSTEMS["ddp"], environment="nowhere"))
    groups: dict[str, tuple[str, ...]] = {"pair": ("alone_sparse", "ddp", "ddp_sparse")}
    slow = (2.0,) if setting.slow else ()
    setting = replace(setting, groups=groups, elsewhere=("pair",), ranks=(RANKS,), rounds=1, slow=slow, turn_ms=1.0)
    kept, console = Kept(tmp_path), Console(file=StringIO())
    lab.Lab(setting, kept, console, tmp_path / "logs").run()

    (block,) = results(setting, kept)["blocks"]
    assert [row.system for row in block["rows"]] == ["alone_sparse", "ddp_sparse"]
    assert "make bench-peers" in block["failures"]["ddp"]
    (place,), perceived_ms = setting.blocks(), block["rows"][0].step_ms.median
    assert kept.rounds(place, "alone_sparse")[0].step_ms == pytest.approx((2.0 if slow else 1.0) * perceived_ms)
    assert not slow or perceived_ms > block["floors"]["compute_ms"] > 0
    lab.Lab(setting, kept, console, tmp_path / "logs").run()
    assert results(setting, kept)["blocks"][0]["rounds"] == block["rounds"]  # nothing was measured again


@pytest.mark.long
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_writes_what_it_has_and_ends(tmp_path: Path, ending: signal.Signals) -> None:
    """The whole group has the signal, as from a terminal; of two systems, one is stopped then."""
    program = "import sys; from pathlib import Path; from benchmarks.lab import __main__ as lab\n"
    program += "lab.KEPT = Path(sys.argv.pop(1)) / 'kept'; lab.main()"  # what others have kept is not measured again
    options = f"{tmp_path} quick --models bert --systems alone_sparse,ddp_sparse --ranks 2 --size tiny --rounds 500"
    command = [sys.executable, "-c", program, *options.split(), "--turn-ms", "5", "--output", str(tmp_path)]
    run: dict[str, Any] = {"env": {**os.environ, "COLUMNS": "200"}, "process_group": 0}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **run) as process:
        opened = (line for line in process.stdout or () if "ms per step" in line)
        assert [next(opened), next(opened)]
        time.sleep(2.0)  # some rounds
        ranks = [pid for rank in children(process.pid) for pid in (rank, *children(rank))]
        os.killpg(process.pid, ending)
        rest, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 130
    assert "interrupted: what was measured is kept" in rest
    (page,) = tmp_path.glob("*.md")
    assert "**Partial:**" in page.read_text()
    deadline = time.monotonic() + PATIENCE_S
    while any(map(is_rank, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
