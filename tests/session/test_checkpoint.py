"""Checkpoints of tables beyond memory: what is loaded goes on to the same bits, on these ranks or others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiers import Run, train

MORE = ("sgd", "nesterov", "rmsprop, centered", "row-wise adagrad")


@pytest.mark.parametrize("optimizer", ["adamw", *(pytest.param(each, marks=pytest.mark.long) for each in MORE)])
def test_resumed_training_goes_on_as_if_nothing_had_been(optimizer: str, tmp_path: Path) -> None:
    run = Run(optimizer, memory=0.2, folder=str(tmp_path / "saved"))
    expected = run_ranks(2, train, replace(run, memory=None, folder=str(tmp_path / "in memory")))
    assert run_ranks(2, train, run) == expected
    assert [losses[run.steps // 2 :] for losses in expected] == run_ranks(2, train, run)


def test_other_ranks_load_what_was_saved(tmp_path: Path) -> None:
    """All rows are read after loading on 3 ranks, and on 1; of a table that nobody has ever held."""
    saved = Run(memory=0.2, steps=20, meta=True, folder=str(tmp_path / "saved"))
    run_ranks(2, train, saved)
    first, second = (run_ranks(ranks, train, replace(saved, steps=0))[0] for ranks in (3, 1))
    assert first == second
