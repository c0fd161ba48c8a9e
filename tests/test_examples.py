"""The examples, run as a user runs them: real processes, real ranks, small sizes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# The tables are just large enough that sharding them pays.
ROWS, WIDTH = 20_000, 32
SIZES = f"--vocabulary {ROWS} --width {WIDTH} --batch-size 8 --length 16 --negatives 64 --steps 30".split()

ONE_PERCENT_FASTER = """
import runpy, sys
import train_language_model
make_model, made = train_language_model.make_model, []
def make_second_faster(settings, corpus):
    model, optimizer = make_model(settings, corpus)
    made.append(model)
    optimizer.param_groups[0]["lr"] *= 1.01 if len(made) == 2 else 1
    return model, optimizer
train_language_model.make_model = make_second_faster
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run(command: list[str], *, expected_status: int = 0) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == expected_status, done.stdout + done.stderr
    return done.stdout


def losses_in(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss +(\d+\.\d+)", text)]


def test_minimal() -> None:
    printed = run([sys.executable, str(EXAMPLES / "minimal.py")])
    losses = losses_in(printed)
    assert losses[-1] < losses[0] / 2
    assert "alltoall" in printed


def test_training_in_a_single_process(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_language_model.py")
    losses = losses_in(run([sys.executable, script, "--output", str(tmp_path), *SIZES]))
    assert losses == sorted(losses, reverse=True)
    assert "embedding_dense_backward" in (tmp_path / "graphs" / "00_captured.py").read_text(encoding="utf-8")


def test_comparison_on_two_ranks(tmp_path: Path) -> None:
    printed = run([*TORCHRUN, str(EXAMPLES / "compare.py"), "--output", str(tmp_path), *SIZES])
    assert "The two curves agree" in printed

    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    ddp, embrace = results["DDP"], results["embrace_fx"]
    assert embrace["losses"] == pytest.approx(ddp["losses"], rel=1e-4)
    assert ddp["losses"][-1] < ddp["losses"][0] - 1

    # A ring AllReduce on two ranks sends what it reduces once per rank; embrace_fx sends no table.
    table_bytes = 2 * ROWS * WIDTH * 4
    assert min(ddp["step_bytes"]) >= 2 * table_bytes
    assert sorted(embrace["step_bytes"])[1] < table_bytes / 4

    graphs = {path.stem[3:]: path.read_text(encoding="utf-8") for path in (tmp_path / "graphs").iterdir()}
    assert "all_to_all" not in graphs["captured"]
    assert "embrace.all_to_all_rows" in graphs["forward"]
    assert "embrace.all_to_all_gradients" in graphs["backward"]
    assert (tmp_path / "report.txt").read_text(encoding="utf-8").count("alltoall") == 2


def test_a_comparison_that_differs_fails(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        ONE_PERCENT_FASTER,
        str(EXAMPLES / "compare.py"),
        "--output",
        str(tmp_path),
        *SIZES,
    ]
    assert "The two curves DIFFER" in run(command, expected_status=1)
