"""The lab, ended from outside: what it writes then, and that nothing of it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.lab.hosts import ROOT

PATIENCE_S = 60.0

# What other runs have kept would not be measured again, and its systems would not open.
_LAB_THAT_KEEPS_IN = """
import sys
from pathlib import Path
from benchmarks.lab import __main__ as lab
lab.KEPT = Path(sys.argv.pop(1)) / "kept"
lab.main()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "ending"),
    [("quick", signal.SIGINT), ("quick", signal.SIGTERM), ("quick", signal.SIGHUP), ("device-quick", signal.SIGINT)],
)
def test_an_interrupted_run_writes_what_it_has_and_leaves_nothing_behind(
    tmp_path: Path, setting: str, ending: signal.Signals
) -> None:
    """The whole group has the signal, as from a terminal; of two systems, one is stopped then."""
    mark, systems = f"LAB_OF={tmp_path}", "--systems=alone_sparse,ddp_sparse"
    options = ["--models=bert", systems, "--ranks=2", "--size=tiny", "--rounds=500", "--turn-ms=5"]
    with subprocess.Popen(
        [sys.executable, "-c", _LAB_THAT_KEEPS_IN, str(tmp_path), setting, *options, "--output", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "LAB_OF": str(tmp_path), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as process:
        assert process.stdout is not None
        opened = (line for line in process.stdout if "ms per step" in line)
        assert next(opened, "")
        assert next(opened, "")  # both systems are open
        time.sleep(2.0)  # some rounds
        namespaces = {found for pid in pids_with(mark) for found in namespaces_of(pid)}
        os.killpg(process.pid, ending)
        rest, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 130
    assert "interrupted: what was measured is kept" in rest
    (page,) = tmp_path.glob("*.md")
    assert "**Partial:**" in page.read_text()
    deadline = time.monotonic() + PATIENCE_S
    while pids_with(mark) or (namespaces - namespaces_of(os.getpid())) & all_namespaces():
        assert time.monotonic() < deadline, f"left behind: {pids_with(mark)}"
        time.sleep(0.1)


def pids_with(mark: str) -> list[int]:
    """Running processes whose environment has a variable, this one not among them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_text(errors="replace"):
                found.append(int(entry.name))
        except OSError:  # it is gone, or another user's
            continue
    return found


def namespaces_of(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/task").glob("*/ns/net"):
        try:
            found.add(os.readlink(entry))
        except OSError:
            continue
    return found


def all_namespaces() -> set[str]:
    return {found for entry in Path("/proc").glob("[0-9]*") for found in namespaces_of(int(entry.name))}
