"""Checkpoints of tables beyond memory: what is loaded goes on to the same bits, on these ranks or others."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import embrace_fx
from embrace_fx.runtime.tables.history import DeferredAdam
from embrace_fx.runtime.tiers.checkpoint import REST
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS
from embrace_fx.runtime.tiers.slot_history import ClosedHistory, align_parts
from tests.support.beside import take_steps
from tests.support.ranks import fresh_ranks, run_ranks
from tests.support.tiers import OPTIMIZERS, OneTable, Run, batches, train

MORE = [name for name in OPTIMIZERS if name != "adamw"]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_training_goes_on_as_if_nothing_had_been(optimizer: str, tmp_path: Path) -> None:
    run = Run(optimizer, memory=0.2, folder=str(tmp_path / "saved"))
    expected = run_ranks(2, train, replace(run, memory=None, folder=str(tmp_path / "in memory")))
    assert run_ranks(2, train, run) == expected
    assert [losses[run.steps // 2 :] for losses in expected] == run_ranks(2, train, run)


def test_other_ranks_load_what_was_saved(tmp_path: Path) -> None:
    """All rows are read after loading on 2 ranks, 3 and 1; of a table that nobody has ever held."""
    saved = Run(memory=0.2, steps=20, meta=True, folder=str(tmp_path / "saved"))
    losses = run_ranks(2, train, saved)
    assert run_ranks(2, train, saved) == [each[10:] for each in losses]
    first, second = (run_ranks(ranks, train, replace(saved, steps=0))[0] for ranks in (3, 1))
    assert first == second


def asked_for_whole(rank: int, world_size: int, folder: str) -> None:
    model = OneTable()
    optimizer = torch.optim.AdamW(model.parameters())
    asked: Any = {"table_memory": 0.4, "spill_to": tempfile.gettempdir(), "strategy": {"table.*": "alltoall"}}
    compiled = embrace_fx.compile(model, optimizer=optimizer, **asked)
    compiled.save_checkpoint(folder)

    def trained() -> list[float]:
        return [loss.item() for loss in take_steps(compiled, optimizer, batches(rank, 3))]

    fresh, expected = optimizer.state_dict(), trained()
    for ask in (
        compiled.full_state_dict,
        optimizer.state_dict,
        lambda: embrace_fx.full_state_dict(optimizer),
        lambda: embrace_fx.save_full_state_dict(compiled, os.devnull),
        lambda: optimizer.load_state_dict(fresh),
        lambda: compiled.load_state_dict(OneTable().state_dict()),
    ):
        with pytest.raises(RuntimeError, match="save and load it with save_checkpoint"):
            ask()
    trained()
    compiled.load_checkpoint(folder)
    assert trained() == expected


def test_state_dicts_of_whole_tables_are_refused_and_a_checkpoint_from_before_the_first_batch_loads(
    tmp_path: Path,
) -> None:
    run_ranks(2, asked_for_whole, str(tmp_path))


def killed(rank: int, world_size: int, run: Run, delay_s: float) -> None:
    """Kills rank 1 after `delay_s` seconds, while it trains and saves repeatedly."""
    if rank == 1:
        threading.Thread(target=_kill, args=(Path(run.folder) / REST, delay_s)).start()
    train(rank, world_size, run)


def _kill(first: Path, delay_s: float) -> None:
    while not first.exists():
        time.sleep(0.01)
    time.sleep(delay_s)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_checkpoint_survives_whatever_ends_a_process(seed: int, tmp_path: Path) -> None:
    """The last one that was put in place loads, whatever was being written beside it."""
    run = Run(memory=0.2, ahead=2, steps=4000, every=2, folder=str(tmp_path / "saved"))
    outcomes = fresh_ranks(2, killed, run, random.Random(seed).uniform(0, 1))
    assert all(outcome.exception is not None for outcome in outcomes), outcomes
    (tmp_path / "saved" / "7.rows").write_bytes(b"of a process that is no more")
    saved = torch.load(tmp_path / "saved" / REST, weights_only=True)["tables"]["table.weight"]
    steps = round(float(saved["counters"].get("step", 0.0)))
    in_memory = Run(ahead=2, steps=steps + 1, every=2, folder=str(tmp_path / "in memory"))
    run_ranks(2, train, in_memory)
    expected = run_ranks(2, train, replace(in_memory, steps=0))
    for ranks in (2, 1):
        assert run_ranks(ranks, train, replace(run, steps=0))[0] == expected[0]


def test_columns_of_ranks_that_had_other_rows_in_memory_are_brought_to_one_step() -> None:
    """Rank 0 had rows 0 to 2 in memory when their history was closed, rank 1 rows 2 to 4."""
    options = torch.optim.Adam([torch.zeros(1)], lr=0.1).param_groups[0]
    steps = DeferredAdam(torch.device("cpu"))
    for count in range(3):
        steps.record(options, {"step": 5.0 + count})
    steps.end()
    rows = {key: torch.rand(5, 6) + 1 for key in (WEIGHTS, "exp_avg", "exp_avg_sq")}
    expected = {key: value.clone() for key, value in rows.items()}

    def apply(to: dict[str, torch.Tensor], places: torch.Tensor) -> None:
        steps.apply_to(to[WEIGHTS], to, places, torch.zeros(5, dtype=torch.int64))

    parts = []
    for own, places in ((slice(0, 3), torch.arange(3)), (slice(3, 6), torch.arange(2, 5))):
        part = {key: value[:, own].clone() for key, value in rows.items()}
        apply(part, places)
        part[TAKEN] = torch.full((5,), 4, dtype=torch.int64).index_fill_(0, places, 7)
        parts.append(part)
    apply(expected, torch.arange(5))
    align_parts(parts, [ClosedHistory(4, steps, range(5))])
    for key, value in expected.items():
        assert torch.equal(torch.cat([part[key] for part in parts], 1), value)
    assert all(bool((part[TAKEN] == 7).all()) for part in parts)
