"""Ranks are killed under torchrun: the job comes back, and ends with the parameters of one never disturbed."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.support.killed import EXAMPLE
from tests.support.ranks import fresh_ranks

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
KILLED = EXAMPLE.parents[1] / "tests" / "support" / "killed.py"


def run(directory: Path, ranks: int, steps: int, *deaths: str) -> list[tuple[int, int]]:
    """Runs the example. Returns (number of ranks, step) for each time that rank 0 resumed training."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*TORCHRUN, "--nproc-per-node", str(ranks), str(KILLED), str(directory), str(steps), *deaths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
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
    """Rank 0 may be killed while a checkpoint is being written: the last complete one is loaded."""
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


def save_killed_at(point: int, directory: Path, state: dict[str, Tensor]) -> None:
    """Saves a checkpoint in this process, which is killed at its file operation number `point`."""
    reached = 0

    def count() -> None:
        nonlocal reached
        reached += 1
        if reached > point:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove") and str(directory) in str(arguments[0]):
            count()

    written = os.fsync

    def fsync(fd: Any) -> None:
        count()
        written(fd)

    os.fsync = fsync
    sys.addaudithook(audit)
    save(state, checkpoint_id=directory / "step-000002", no_dist=True)


def kill_at_every_point(rank: int, world_size: int, directory: Path) -> list[int]:
    """Returns, for each file operation at which saving was killed, the step of the checkpoint that was found."""
    warnings.simplefilter("ignore")  # torch warns that it saves in a single process
    latest = runpy.run_path(str(EXAMPLE))["latest"]
    states = {step: {"weight": torch.full((300,), float(step)), "step": torch.tensor(step)} for step in (1, 2)}
    found: list[int] = []
    status = -1
    while status != 0:
        shutil.rmtree(directory, ignore_errors=True)
        save(states[1], checkpoint_id=directory / "step-000001", no_dist=True)
        child = os.fork()
        if child == 0:
            save_killed_at(len(found), directory, states[2])
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        path = latest(directory)
        step = int(path.name.removeprefix("step-"))
        loaded = {"weight": torch.zeros(300), "step": torch.tensor(0)}
        load(loaded, checkpoint_id=path, no_dist=True)
        assert all(torch.equal(value, states[step][name]) for name, value in loaded.items()), len(found)
        found.append(step)
    return found


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    (outcome,) = fresh_ranks(1, kill_at_every_point, tmp_path / "checkpoints")
    assert outcome.exception is None, outcome
    assert outcome.result is not None
    assert len(outcome.result) > 5
    assert outcome.result == sorted(outcome.result)
    assert set(outcome.result) == {1, 2}
