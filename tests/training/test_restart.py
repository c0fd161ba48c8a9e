"""Ranks are killed under torchrun: the job comes back, and ends with the parameters of one never disturbed."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.killed import EXAMPLE

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
KILLED = EXAMPLE.parents[1] / "tests" / "support" / "killed.py"


def run(directory: Path, ranks: int, steps: int, *deaths: str) -> list[tuple[int, int]]:
    """Runs the example; (number of ranks, step) from which it went on, on rank 0."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*TORCHRUN, "--nproc-per-node", str(ranks), str(KILLED), str(directory), str(steps), *deaths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [(int(n), int(step)) for n, step in re.findall(r"rank 0 of (\d+) goes on from step (\d+)", done.stdout)]


def trained_alone(steps: int) -> dict[str, Tensor]:
    example = runpy.run_path(str(EXAMPLE))
    model: nn.Module = example["make_model"]()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for step in range(steps):
        words, wanted = example["batch_of"](step, 0, 1)
        nn.functional.mse_loss(model(words), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def check(directory: Path, steps: int) -> None:
    found, expected = torch.load(directory / "weights.pt"), trained_alone(steps)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.long
def test_a_job_whose_ranks_are_killed_comes_back_and_computes_the_same(tmp_path: Path) -> None:
    """Rank 0 is killed where a checkpoint may still be on its way: the last whole one counts."""
    went_on = run(tmp_path, 2, 17, "1:8", "0:15")

    assert went_on[0] == (2, 5)
    assert went_on[1][1] in (10, 15)
    check(tmp_path, 17)


@pytest.mark.long
def test_a_job_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    assert run(tmp_path, 2, 10) == []
    assert run(tmp_path, 3, 15, "2:12") == [(3, 10), (3, 10)]
    assert run(tmp_path, 1, 18) == [(1, 15)]
    check(tmp_path, 18)
