"""The examples, run as a user runs them, at small sizes; the comparison on real ranks."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE_MODULES = {path.stem for path in EXAMPLES.glob("*.py")}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

ROWS, WIDTH = 20_000, 32  # just large enough that sharding pays
SIZES = f"--vocabulary {ROWS} --width {WIDTH} --batch-size 8 --length 16 --negatives 64 --steps 30".split()


def run(*command: str) -> str:
    """Runs a separate process, and returns what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(autouse=True)
def _importable_examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the examples import each other by plain names, for the tests of this module only."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield
    for name in EXAMPLE_MODULES & set(sys.modules):
        del sys.modules[name]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns a function that runs a script in this process, which has already imported torch."""

    def run_here(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        except SystemExit as exit_:
            return f"{capsys.readouterr().out}exit status {exit_.code}"
        return capsys.readouterr().out

    return run_here


def losses_in(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss +(\d+\.\d+)", text)]


def test_minimal(run_here: Callable[..., str]) -> None:
    torch.manual_seed(0)
    printed = run_here("minimal.py")
    losses = losses_in(printed)
    assert losses[-1] < losses[0] / 2
    assert "alltoall" in printed


def test_admm(run_here: Callable[..., str]) -> None:
    torch.manual_seed(0)
    printed = run_here("admm.py")
    losses = losses_in(printed)
    assert losses[-1] < losses[0] / 2
    found = re.search(r"accuracy on new sentences (\d\.\d+)", printed)
    assert found is not None
    assert float(found[1]) > 0.8


@pytest.mark.long
def test_training_in_a_single_process(run_here: Callable[..., str], tmp_path: Path) -> None:
    losses = losses_in(run_here("train_language_model.py", "--output", str(tmp_path), *SIZES))
    assert losses == sorted(losses, reverse=True)
    assert "embedding_dense_backward" in (tmp_path / "graphs" / "00_captured.py").read_text(encoding="utf-8")


@pytest.mark.long
def test_comparison_on_two_ranks(tmp_path: Path) -> None:
    # Request "alltoall", because the choice of "auto" depends on how busy the machine is.
    printed = run(*TORCHRUN, str(EXAMPLES / "compare.py"), "--output", str(tmp_path), *SIZES, "--strategy", "alltoall")
    assert "The two curves agree" in printed

    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    ddp, embrace = results["DDP"], results["embrace_fx"]
    assert embrace["losses"] == pytest.approx(ddp["losses"], rel=1e-4)
    assert ddp["losses"][-1] < ddp["losses"][0] - 1

    table_bytes = 2 * ROWS * WIDTH * 4  # each of two ranks in a ring AllReduce sends the tables once
    assert min(ddp["step_bytes"]) >= 2 * table_bytes
    assert sorted(embrace["step_bytes"])[1] < table_bytes / 4

    graphs = {path.stem[3:]: path.read_text(encoding="utf-8") for path in (tmp_path / "graphs").iterdir()}
    assert "all_to_all" not in graphs["captured"]
    assert "embrace.await_rows" in graphs["forward"]
    assert "embrace.submit_gradients" in graphs["backward"]
    pictures = ("schedule.html", "schedule.svg", "timeline.html", "timeline.svg", "trace.json")
    assert all((tmp_path / name).stat().st_size > 1000 for name in pictures)
    assert (tmp_path / "report.txt").read_text(encoding="utf-8").count("alltoall") == 2
