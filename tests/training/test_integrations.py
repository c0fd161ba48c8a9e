"""Loops of Accelerate, Hugging Face's Trainer and Lightning on 2 ranks: embrace_fx's losses are DDP's."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import close_pool, run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"

LOSSES = {"accelerate_loop.py": "losses.json", "trainer_loop.py": "log.json", "lightning_loop.py": "losses.json"}
SAVED = {"accelerate_loop.py": "state", "trainer_loop.py": "checkpoint-10", "lightning_loop.py": "last.ckpt"}
"""What a run of 10 steps leaves."""


def run(script: str, system: str, output: Path, *options: str, ranks: int = 2) -> list[Any]:
    """Runs an example as a user would. Returns the results that the example wrote to `output`."""
    output.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(EXAMPLES / script), "--system", system, "--output", str(output), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((output / LOSSES[script]).read_text())


def assert_near(found: Sequence[Any], expected: Sequence[Any], within: float = 1e-6) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=within, rel=within)


CASES = [
    pytest.param("accelerate_loop.py", ("--steps", "4"), id="accelerate, 4 steps"),
    pytest.param("accelerate_loop.py", (), id="accelerate"),
    pytest.param("accelerate_loop.py", ("--accumulate", "3"), id="accelerate, accumulation"),
    pytest.param("accelerate_loop.py", ("--mixed-precision", "bf16"), id="accelerate, bf16"),
    pytest.param("trainer_loop.py", (), id="trainer"),
    pytest.param("trainer_loop.py", ("--accumulate", "2"), id="trainer, accumulation"),
    pytest.param("trainer_loop.py", ("--bf16",), id="trainer, bf16"),
    pytest.param("lightning_loop.py", (), id="lightning"),
    pytest.param("lightning_loop.py", ("--accumulate", "2"), id="lightning, accumulation"),
    pytest.param("lightning_loop.py", ("--of-parts",), id="lightning, several children"),
    pytest.param("lightning_loop.py", ("--precision", "bf16-mixed"), id="lightning, bf16"),
]


BRIEF = {
    "accelerate_loop.py": ("--steps", "2", "--accumulate", "2"),
    "trainer_loop.py": ("--steps", "10"),
    "lightning_loop.py": ("--steps", "2", "--accumulate", "2"),
    "lightning_loop.py, several children": ("--steps", "2", "--of-parts"),
}
RESUMED = ("trainer_loop.py", "lightning_loop.py")


def run_both(rank: int, ranks: int, folder: Path) -> list[set[str]]:
    """Runs examples as `run` does, and some again from what they have saved. Returns what Trainer has logged."""
    from accelerate.state import AcceleratorState  # noqa: PLC0415  (these imports take seconds)
    from transformers import Trainer  # noqa: PLC0415

    from embrace_fx.integrations.transformers import EmbraceTrainer  # noqa: PLC0415

    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    logged, log, leave = list[set[str]](), Trainer.log, dist.destroy_process_group

    def noted(self: Any, logs: dict[str, float], *rest: Any) -> None:
        logged.append({*logs})
        log(self, logs, *rest)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "tests"}.items():
            patch.setenv(name, str(value))
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr(dist, "destroy_process_group", lambda group=None: None if group is None else leave(group))
        patch.setattr(EmbraceTrainer, "logs_metrics", True)
        patch.setattr(Trainer, "log", noted)
        for name, options in BRIEF.items():
            script = name.partition(",")[0]
            for system in ("ddp", "embrace_fx"):
                saved, output = folder / f"{name} {system}" / SAVED[script], folder / f"{name} {system}"
                resume = ("--steps", str(int(options[1]) + 2), "--resume", str(saved))
                for more in ((), resume) if name in RESUMED else ((),):
                    AcceleratorState._reset_state(reset_partial_state=True)
                    output = output / "again" if more else output
                    output.mkdir(parents=True, exist_ok=True)
                    patch.setattr(sys, "argv", [script, "--system", system, "--output", str(output), *options, *more])
                    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return logged


def test_a_few_steps_are_ddps(tmp_path: Path) -> None:
    own = {"embrace_fx/tables_sharded", "embrace_fx/sent_bytes_predicted", "embrace_fx/sent_bytes_ddp"}
    logged, _ = run_ranks(2, run_both, tmp_path)
    close_pool()  # later tests need no ranks that have imported so much
    assert [own <= each for each in logged] == [k >= len(logged) / 2 and "loss" in e for k, e in enumerate(logged)]
    for name in BRIEF:
        for place in ("", "again") if name in RESUMED else ("",):
            expected, found = (
                json.loads((tmp_path / f"{name} {system}" / place / LOSSES[name.partition(",")[0]]).read_text())
                for system in ("ddp", "embrace_fx")
            )
            assert_near(found, expected)


@pytest.mark.long
@pytest.mark.parametrize(("script", "options"), CASES)
@pytest.mark.timeout(300)
def test_losses_and_norms_are_ddps(script: str, options: tuple[str, ...], tmp_path: Path) -> None:
    expected = run(script, "ddp", tmp_path / "ddp", *options)
    assert_near(run(script, "embrace_fx", tmp_path / "embrace_fx", *options), expected)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["accelerate_loop.py", "lightning_loop.py"])
def test_tables_are_sharded_in_their_loops(script: str, tmp_path: Path) -> None:
    expected = run(script, "ddp", tmp_path / "ddp")
    assert_near(run(script, "embrace_fx", tmp_path / "embrace_fx", "--strategy", "alltoall"), expected)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", sorted(LOSSES))
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_2_ranks_save_others_resume(script: str, ranks: int, tmp_path: Path) -> None:
    asked = ("--strategy", "alltoall") if script.startswith("accelerate") else ()
    run(script, "embrace_fx", tmp_path / "first", "--steps", "10", *asked)
    saved = str(tmp_path / "first" / SAVED[script])
    expected = run(script, "ddp", tmp_path / "ddp", "--steps", "20", "--resume", saved, ranks=ranks)
    found = run(script, "embrace_fx", tmp_path / "again", "--steps", "20", "--resume", saved, *asked, ranks=ranks)
    assert_near(found, expected)
