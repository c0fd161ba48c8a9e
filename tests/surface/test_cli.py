"""Each command of the command line, and every fault that `doctor` has to find."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from embrace_fx import cli
from embrace_fx.cli import examine
from embrace_fx.cli.side_by_side import find_loss
from embrace_fx.cost.links import Cluster
from embrace_fx.viz import dot, save, trace
from embrace_fx.vocabulary.plan import Decision, Plan
from tests.support import timelines
from tests.support.golden import check_golden
from tests.support.ranks import run_ranks

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
show plan.json
show other.dot
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
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(folder / prefix))
    (folder / "embrace-fx-").mkdir()
    monkeypatch.setattr("webbrowser.open", lambda url: url == (folder / "embrace-fx-" / "plan.html").as_uri())
    (folder / "good.json").write_text('{"bandwidth_bytes_per_ms": 1e4, "latency_ms": 0.01}')
    (folder / "bad.json").write_text('{"bandwith": 1}')
    (folder / "other.json").write_text('{"traceEvents": []}')
    Plan(2, (Decision("a", (3, 2), False, "allreduce", "dense gradient", 24, 24, 0.5),), (("a",),)).save("only.json")
    told = ""
    for command in PRINTED.strip().splitlines():
        result = CliRunner().invoke(cli.main, command.split(), prog_name="embrace-fx")
        told += f"$ embrace-fx {command}\n{result.output}exit status {result.exit_code}\n\n"
    check_golden("cli", told.replace(str(folder), "FOLDER"))


MACHINE: dict[str, Any] = {
    "platform.python_version": lambda: "3.12.1",
    "sys.version_info": (3, 12),
    "torch.__version__": "2.12.0+cpu",
    "importlib.metadata.version": lambda package: f"1.0 of {package}",
    "importlib.util.find_spec": lambda name: None,
    "shutil.which": lambda name, path: f"/bin/{name}" if name in ("clang++", "g++") else None,
    "socket.if_nameindex": lambda: [(1, "lo"), (2, "eth0")],
    "os.cpu_count": lambda: 4,
    "torch.distributed.is_nccl_available": lambda: False,
}
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
GPUS = {"torch.cuda.is_available": lambda: True, "torch.cuda.device_count": lambda: 2}
WITH_NCCL = {"torch.distributed.is_nccl_available": lambda: True}
PROBES: dict[str, Any] = {
    "torch.distributed.init_process_group": lambda: None,
    "torch.distributed.destroy_process_group": lambda: None,
    "embrace_fx.runtime.probe.probe.probe_cluster": lambda communicator: Cluster(),
}


def no_answer(*_: Any) -> None:
    raise OSError("no answer")


FAULTS: dict[str, dict[str, Any]] = {
    "a single process": {},
    "rank 0 of 2": LAUNCHED | PROBES | {"GLOO_SOCKET_IFNAME": "eth0,lo", "CXX": "g++"},
    "rank 1 of 2": LAUNCHED | PROBES | {"RANK": "1"},
    "rank 1 without rank 0": LAUNCHED | PROBES | {"RANK": "1", "torch.distributed.init_process_group": no_answer},
    "rank 2 of 2": LAUNCHED | {"RANK": "2"},
    "rank -1": LAUNCHED | {"RANK": "-1"},
    "half a launch": {"WORLD_SIZE": "2"},
    "an unknown host": LAUNCHED | {"MASTER_ADDR": "nowhere", "socket.getaddrinfo": no_answer},
    "an old torch": {"torch.__version__": "2.10.1+cpu"},
    "the oldest torch": {"torch.__version__": "2.11.0"},
    "an old Python": {"sys.version_info": (3, 10)},
    "no backend": {"torch.distributed.is_gloo_available": lambda: False},
    "no torch.distributed": {"torch.distributed.is_available": lambda: False},
    "no compiler": {"CXX": "cc", "GLOO_SOCKET_IFNAME": "eth1,lo"},
    "no compiler at all": {"shutil.which": lambda name, path: None},
    "many threads": {"LOCAL_WORLD_SIZE": "3", "OMP_NUM_THREADS": "2"},
    "as many threads as cores": {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "2"},
    "threads of more ranks than cores": {"LOCAL_WORLD_SIZE": "5"},
    "GPUs": GPUS | WITH_NCCL | {"importlib.util.find_spec": str, "LOCAL_WORLD_SIZE": "2"},
    "GPUs without NCCL": GPUS,
}
READ = (*examine.LAUNCH_VARIABLES, "GLOO_SOCKET_IFNAME", "CXX", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")


def test_what_the_doctor_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    told, usual = "", list[str]()
    for name, faults in FAULTS.items():
        with monkeypatch.context() as patch:
            for variable in READ:
                patch.delenv(variable, raising=False)
            for place, value in (MACHINE | faults).items():
                (patch.setattr if "." in place else patch.setenv)(place, value)
            result = CliRunner().invoke(cli.main, ["doctor"])
        lines = result.output.splitlines()
        told += f"{name}: exit status {int(result.exit_code)}\n" + "".join(f"{e}\n" for e in lines if e not in usual)
        usual = usual or lines
    check_golden("doctor", told)


def measured(turn_ms: Sequence[int], sent: Sequence[dict[int, int] | None]) -> Any:
    """A clock and counters of sent bytes: each turn takes and sends what the test says."""
    times = iter([s for k, ms in enumerate(turn_ms) for s in (k, k + ms / 1e3)])
    return SimpleNamespace(perf_counter=partial(next, times), sent_by_connection=partial(next, iter(sent)))


SENT: tuple[dict[int, int], ...] = ({}, {1: 5120}, {}, {1: 80}, {1: 80}, {1: 90, 2: 70}, {3: 20}, {3: 10260})
BENCHES: dict[str, Any] = {
    "small --steps 6": ([50, 20, 30, 70], SENT),
    "named --steps 5": ([40, 50], (None, {}, {}, {})),
}


def bench_on_ranks(rank: int, ranks: int) -> tuple[str, str, list[Any]]:
    told, errors, calls = "", "", list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        for name in ("init_process_group", "destroy_process_group"):
            patch.setattr(f"torch.distributed.{name}", lambda name=name: calls.append(name))
        MADE.clear()
        for command, of_turns in BENCHES.items():
            instruments = measured(*of_turns)
            patch.setattr("embrace_fx.cli.side_by_side.time", instruments)
            patch.setattr("embrace_fx.cli.side_by_side.sent_by_connection", instruments.sent_by_connection)
            result = CliRunner().invoke(cli.main, ["bench", *f"tests.surface.test_cli:{command}".split()])
            printed, plan, _ = result.stdout.partition("embrace_fx plan, 2 rank(s)")
            told += f"$ bench {command}\n{printed.rstrip()}\n{plan}\n".replace("\n\n", "")
            errors += "".join(f"{each}\n" for each in result.stderr.splitlines() if each.startswith("bench"))
            calls.append(result.exit_code)
    return told, errors, [*calls, [[p.detach() for p in model.parameters()] for model in MADE]]


MADE: list[nn.Module] = []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(20, 4), nn.Linear(4, 1)
        MADE.append(self)

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        rows = self.table(ids)
        return {"rows": rows, "loss": self.top(rows).square().mean() * scale}


def small() -> Any:
    model = Net()
    return model, (torch.arange(8), torch.tensor(2.0)), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def named() -> Any:
    return Net(), {"scale": torch.tensor(3.0), "ids": torch.arange(6)}


PROGRESS = """\
bench: DDP: 3 steps to warm up
bench: embrace_fx: 3 steps to warm up
bench: turn 1 of 2, 5 steps of each
bench: turn 2 of 2, 5 steps of each
bench: DDP: 3 steps to warm up
bench: embrace_fx: 3 steps to warm up
bench: turn 1 of 1, 5 steps of each
"""
TOLD = """\
$ bench small --steps 6
2 ranks, medians over 2 turns of 5 steps, on one batch
DDP             12.00 ms a step
embrace_fx       5.00 ms a step, 2.40 times as fast
rank 0 sends 1.5 KiB a step under DDP, 16 B under embrace_fx, measured on its connections
embrace_fx plan, 2 rank(s)
$ bench named --steps 5
2 ranks, medians over 1 turns of 5 steps, on one batch
DDP              8.00 ms a step
embrace_fx      10.00 ms a step, 0.80 times as fast
embrace_fx plan, 2 rank(s)
"""


def test_bench_trains_both_systems_and_prints_their_medians() -> None:
    first, second = run_ranks(2, bench_on_ranks)
    assert first[:2] == (TOLD, PROGRESS)
    assert second[:2] == ("$ bench small --steps 6\n$ bench named --steps 5\n", "")
    for make, steps, *made in ((small, 13, *range(2)), (named, 8, *range(2, 4))):
        torch.manual_seed(0)
        model, batch, *optimizer = make()
        optimizer = optimizer or [torch.optim.SGD(model.parameters(), 0.01)]
        for _ in range(steps):
            (model(**batch) if isinstance(batch, dict) else model(*batch))["loss"].backward()
            optimizer[0].step()
            optimizer[0].zero_grad()
        for _, _, (*calls, found) in (first, second):
            assert calls == ["init_process_group", "destroy_process_group", 0] * 2
            for each in made:
                torch.testing.assert_close(found[each], list(model.parameters()))


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
