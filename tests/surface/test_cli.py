"""Each command of the command line, and every fault that `doctor` has to find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from embrace_fx import cli
from embrace_fx.cli import examine
from embrace_fx.cli.side_by_side import find_loss
from embrace_fx.viz import dot, save, trace
from embrace_fx.vocabulary.plan import Decision, Plan
from tests.support import timelines
from tests.support.golden import check_golden

FACTORY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(200_000, 16)
        self.top = nn.Linear(16, 1)

    def forward(self, ids):
        return self.top(self.table(ids)).square().mean()

def make():
    model = Model()
    return model, torch.arange(64), torch.optim.SGD(model.parameters(), 0.1)

def nothing():
    return Model()

def four():
    return Model(), 1, 2, 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to a temporary folder that contains the factory."""
    (tmp_path / "made_here.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "made_here", raising=False)
    return tmp_path


def run(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == status, result.output
    return result.output


def test_a_plan_in_every_form_and_its_pictures_converted(folder: Path) -> None:
    (folder / "cluster.json").write_text('{"bandwidth_bytes_per_ms": 1e4, "latency_ms": 0.01}')
    files = ("plan.json", "plan.html", "plan.svg")
    outputs = [argument for name in files for argument in ("--output", name)]

    run("plan", "made_here:make", "--world-size", "64", "--schedule", "2d", "--cluster", "cluster.json", *outputs)

    found = json.loads((folder / "plan.json").read_text())
    assert found["plan"]["decisions"][0]["strategy"] == "alltoall"
    assert found["plan"]["links"]["bandwidth_bytes_per_ms"] == 1e4
    assert found["schedule"]["step_ms"] > 0
    assert "wrote again.svg" in run("show", "plan.json", "--output", "again.svg")
    assert "table.weight" in (folder / "plan.html").read_text()
    assert (folder / "plan.svg").read_text().startswith("<svg")


def test_a_trace_becomes_a_page_with_the_same_figures(folder: Path) -> None:
    schedule = timelines.schedule()
    timeline = timelines.timeline(schedule)
    save(folder / "trace.json", schedule=schedule, timeline=timeline)
    assert "wrote page.html" in run("show", "trace.json", "--output", "page.html")
    assert trace.read_trace(folder / "trace.json") == (schedule, timeline)
    assert "measured" in (folder / "page.html").read_text()
    assert "wrote steps.dot" in run("show", "trace.json", "--output", "steps.dot")
    assert (folder / "steps.dot").read_text() == dot.render(schedule)


PRINTED = """
plan made_here:make --device h100 --bandwidth 80Mb/s --row-updates lazy
plan made_here:make --world-size 1 --output plan.txt --output plan.json
plan made_here:make --cluster good.json --world-size 2 --schedule none --output other.dot
plan made_here:make --output other.txt --output plan.png
show only.json
show plan.json --output again.png
show plan.txt --output again.svg
show other.json --output again.svg
plan made_here
plan not_here:make
plan made_here:missing
plan made_here:nothing
plan made_here:four
plan made_here:make --cluster bad.json
plan made_here:make --cluster good.json --device h100
plan made_here:make --bandwidth 25
plan made_here:make --bandwidth 0Gb/s
plan made_here:make --device h1
bench made_here:make
"""


def test_what_is_printed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("RANK", raising=False)
    (folder / "good.json").write_text('{"bandwidth_bytes_per_ms": 1e4, "latency_ms": 0.01}')
    (folder / "bad.json").write_text('{"bandwith": 1}')
    (folder / "other.json").write_text('{"traceEvents": []}')
    Plan(2, (Decision("a", (3, 2), False, "allreduce", "dense gradient", 24, 24, 0.5),), (("a",),)).save("only.json")
    told = ""
    for command in PRINTED.strip().splitlines():
        result = CliRunner().invoke(cli.main, command.split(), prog_name="embrace-fx")
        told += f"$ embrace-fx {command}\n{result.output}exit status {result.exit_code}\n\n"
    check_golden("cli", told)


WELL = {"PATH": os.environ["PATH"], "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("fault", "subject", "state", "found"),
    [
        ({"CXX": "no-such-compiler"}, "C++ compiler", "limits", "CXX=no-such-compiler, which does not exist"),
        ({"GLOO_SOCKET_IFNAME": "nosuch0"}, "network interface", "fails", "GLOO_SOCKET_IFNAME=nosuch0"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, "meeting place", "fails", "MASTER_ADDR=no.such.host.invalid"),
        ({"RANK": "2"}, "launch", "fails", "RANK=2 of WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "64", "OMP_NUM_THREADS": "4096"}, "threads", "limits", "64 rank(s) of 4096 thread(s)"),
    ],
)
def test_the_doctor_finds_a_planted_fault(fault: dict[str, str], subject: str, state: str, found: str) -> None:
    before = {finding.subject for finding in examine.run_checks(WELL) if finding.to_do}
    (finding,) = [each for each in examine.run_checks(WELL | fault) if each.to_do and each.subject not in before]
    assert (finding.subject, finding.state) == (subject, state)
    assert finding.found.startswith(found)


def test_the_doctor_finds_half_a_launch_and_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine.launcher_variables({"WORLD_SIZE": "2"}).found == "WORLD_SIZE without RANK, MASTER_ADDR, MASTER_PORT"
    monkeypatch.setattr("torch.__version__", "2.9.1+cpu")
    assert examine.software_versions({}).state == "fails"


def test_the_doctor_on_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*examine.LAUNCH_VARIABLES, "GLOO_SOCKET_IFNAME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    printed = run("doctor")
    assert "works  launch: a single process" in printed
    assert "fails" not in printed


@pytest.mark.long
def test_two_ranks_probe_their_links_and_compare_two_systems(folder: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def said(*command: str) -> str:
        done = subprocess.run(
            [*torchrun, "embrace_fx.cli", *command], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "works  links: " in said("doctor")
    printed = said("bench", "made_here:make", "--steps", "2")
    assert "times as fast" in printed
    assert "rank 0 sends 12.2 MiB" in printed  # the dense gradient of a 200,000 x 16 table
    assert "embrace_fx plan, 2 rank(s)" in printed


def test_bench_finds_the_loss_in_what_a_model_returns() -> None:
    loss, logits = torch.tensor(2.0), torch.ones(3)
    for results in (loss, SimpleNamespace(loss=loss, first=torch.tensor(1.0)), {"logits": logits, "total": loss}):
        assert find_loss(results) is loss
    with pytest.raises(ValueError, match="without a scalar"):
        find_loss(logits)
