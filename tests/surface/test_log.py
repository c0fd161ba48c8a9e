"""What a first call says unasked: one line of what was decided, and what takes long while it does."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from embrace_fx.setup import log as progress
from tests.support.first_contact import on_terminal, program, through_a_pipe

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SLOW = program("from torch._dynamo.comptime import comptime", slow="comptime(lambda _: time.sleep(5))")
"""Of a model whose forward takes 5 s to capture."""


def said(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.long
def test_one_line_on_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(program()[-1])
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
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.2)
    with progress.stage("planning"):
        for _ in range(3):  # each short, together long
            with progress.stage("probing links"):
                time.sleep(0.15)
            time.sleep(0.15)
    with progress.stage("placing"):
        pass
    with progress.stage("capturing", rank=1):
        time.sleep(0.5)

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"embrace_fx: (probing links|planning), \d s so far", line) for line in lines)
    assert not progress._of_thread.stages


def test_a_stage_outside_of_the_main_thread_is_told_of_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.1)

    def train() -> None:
        with progress.stage("capturing"):
            time.sleep(0.5)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()

    assert "embrace_fx: capturing, " in capsys.readouterr().err


LONGEST_SILENCE_S = 3.0
"""Two seconds that a user may have to wait for a word, and one by which a machine that others use may be late."""


@pytest.mark.long
@pytest.mark.parametrize("terminal", [True, False])
def test_no_stall_is_silent(terminal: bool) -> None:
    """From the first word of the call to the end of it."""
    status, written = on_terminal(SLOW, 250) if terminal else through_a_pipe(SLOW, 250)
    text = "".join(each for _, each in written)
    assert status == 0, text
    assert re.search(r"embrace_fx: capturing, [345] s", text), text
    assert "embrace_fx: 1 rank, 1 table: nothing is sent." in text
    assert max(after - before for (before, _), (after, _) in pairwise(written)) < LONGEST_SILENCE_S, written
