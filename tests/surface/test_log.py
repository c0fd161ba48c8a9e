"""What a first call says unasked: one line of what was decided, and what takes long while it does."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from embrace_fx import api
from embrace_fx.setup import log as progress

TRAIN = """
import torch, torch.distributed as dist
import embrace_fx

dist.init_process_group("gloo")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.top = torch.nn.Embedding(4000, 8), torch.nn.Linear(8, 1)

    def forward(self, ids):
        return self.top(self.table(ids)).square().mean()

model = embrace_fx.compile(Model(), strategy="alltoall", cluster=embrace_fx.Cluster(1e3, 0.1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    model(torch.arange(6)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def said(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.long
def test_one_line_on_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    lines = [line for line in said([*TORCHRUN, str(script)]).splitlines() if line.startswith("embrace_fx: ")]
    (told,) = [line for line in lines if "sharded" in line]
    assert told.startswith("embrace_fx: 1 table sharded: table.weight, 0 whole; a rank sends ")
    assert told.endswith(" per step, DDP 125.0 KiB; model.report() says why")
    assert len(told) <= 120
    assert "predicted" not in told, "before a step has been measured"


@pytest.mark.parametrize(
    ("set_up", "shown"),
    [
        ("", True),
        ('logging.getLogger("embrace_fx").setLevel(logging.WARNING)', False),
        ("logging.disable(logging.INFO)", False),
        ("logging.basicConfig()", False),
        ("logging.basicConfig(level=logging.INFO, format='%(name)s %(levelname)s')", True),
    ],
    ids=["nothing configured", "logger's level", "disabled", "a root of warnings", "a root of information"],
)
def test_logging_decides_what_is_shown(
    set_up: str, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(progress.logger, "handlers", [])
    before = root.level, progress.logger.level, root.manager.disable
    try:
        exec(set_up, {"logging": logging})
        progress.log("%d tables", 3)
    finally:
        root.setLevel(before[0])
        progress.logger.setLevel(before[1])
        logging.disable(before[2])

    found = capsys.readouterr().err
    assert bool(found) == shown
    if shown and not set_up:
        assert found == "embrace_fx: 3 tables\n"
    elif shown:
        assert found == "embrace_fx INFO\n"


def test_stages_that_take_long_are_told_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.1)
    with progress.stage("planning"):
        for _ in range(3):  # each stage is short, but all three are long
            with progress.stage("probing links"):
                time.sleep(0.08)
            time.sleep(0.08)
    with progress.stage("placing"):
        pass
    with progress.stage("capturing", rank=1):
        time.sleep(0.25)

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"embrace_fx: (probing links|planning), \d s so far", line) for line in lines)
    assert not progress._of_thread.stages


def test_a_rank_that_loads_the_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, int]] = []

    def stage(what: str, rank: int) -> contextlib.AbstractContextManager[None]:
        said.append((what, rank))
        return contextlib.nullcontext()

    monkeypatch.setattr(api, "stage", stage)
    monkeypatch.setenv("RANK", "3")
    api.compile(torch.nn.Linear(1, 1))
    assert said == [("loading torch's compiler", 3)]
