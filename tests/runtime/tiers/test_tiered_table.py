"""A table beyond memory moves as the same table in memory: to the bit, however long rows rest, and on any ranks."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embrace_fx.runtime.tiers.record_file import RecordFile, TierError
from tests.support.cases import long_but
from tests.support.ranks import fresh_ranks, run_ranks, run_ranks_expecting_errors
from tests.support.tiers import OPTIMIZERS, Run, assert_same_losses, beyond_memory, in_memory, train

V, D = 300, 5
MOST = ("adagrad",)
"""Optimizers that do what the others do, and more."""


@pytest.mark.parametrize(
    "share", [pytest.param(0.5, marks=pytest.mark.long), pytest.param(0.1, marks=pytest.mark.long), 0.02]
)
@pytest.mark.parametrize("optimizer", long_but(MOST, {name: (name,) for name in OPTIMIZERS}))
def test_rows_that_rest_move_as_in_memory(optimizer: str, share: float, tmp_path: Path) -> None:
    """Rows rest for up to 130 steps; histories end where parameters are asked for, at steps 30 and 80."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(V, D, generator=generator)
    expected = in_memory(table, OPTIMIZERS[optimizer])
    found = beyond_memory(table, OPTIMIZERS[optimizer], round(share * V), tmp_path)
    told = deque([torch.arange(4), torch.arange(4, 8)])
    with torch.no_grad():
        for step in range(130):
            coming = (V ** torch.rand(4, generator=generator) - 1).long()
            found.store.memory.begin_step(step)
            if step % 3:  # sometimes announces rows for two steps later; not all of them are used then
                found.store.memory.read_ahead(coming, step + 2)
            told.append(coming)
            ids = told.popleft() if step % 5 else (V ** torch.rand(4, generator=generator) - 1).long()
            assert torch.equal(found.look_up(ids), expected.look_up(ids)), step
            ids = ids.unique()
            rows = torch.randn(len(ids), D, generator=generator)
            for each in (found, expected):
                each.begin_step().finish([(ids, rows)])
                if step in (30, 80):
                    each.flush()
        for ids in torch.arange(V).split(6):
            assert torch.equal(found.look_up(ids), expected.look_up(ids))
    moved = not optimizer.startswith(("sgd", "adagrad", "row-wise")) or optimizer == "sgd, decayed"
    assert found.store.memory.counts.written > (V // 2 if moved and share < 0.1 else 0)


def _late(write: Callable[..., None]) -> Callable[..., None]:
    def late(*args: Any) -> None:
        time.sleep(0.005)
        write(*args)

    return late


def test_rows_of_which_the_page_cache_lacks_some_move_as_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread reads those, which is behind with what it writes."""
    read_cached, read, left = RecordFile.read_cached, RecordFile.read, 0

    def some_cached(file: RecordFile, numbers: Tensor, *args: Any) -> Tensor | None:
        return read_cached(file, numbers, *args) if bool((numbers % 3 > 0).all()) else None

    def counted(file: RecordFile, numbers: Tensor, *args: Any) -> Tensor:
        nonlocal left
        left += numbers.numel()
        return read(file, numbers, *args)

    monkeypatch.setattr(RecordFile, "read_cached", some_cached)
    monkeypatch.setattr(RecordFile, "read", counted)
    monkeypatch.setattr(RecordFile, "write", _late(RecordFile.write))
    test_rows_that_rest_move_as_in_memory("adamw", 0.1, tmp_path)
    assert left > V


@pytest.mark.parametrize(
    ("world_size", "run"),
    [
        pytest.param(2, Run("adamw", "2d", 0.3, ahead=3), marks=pytest.mark.long),
        (1, Run("momentum", "none", 0.3, ahead=2)),
        pytest.param(3, Run("adamw", "2d", 0.5, ahead=4, steps=80), marks=pytest.mark.long),
        pytest.param(2, Run("adamw", "none", 0.2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_model_trains_as_in_memory(world_size: int, run: Run) -> None:
    assert_same_losses(world_size, run)


@pytest.mark.long
def test_table_on_the_meta_device_does_not_depend_on_memory_or_ranks() -> None:
    little, much = (run_ranks(2, train, Run(memory=memory, meta=True, steps=15)) for memory in (0.15, 0.95))
    assert little == much
    assert run_ranks(1, train, Run(memory=0.3, meta=True, steps=1))[0][0] == little[0][0]


@pytest.mark.long
def test_batch_larger_than_memory_is_an_error_on_every_rank() -> None:
    least = set()
    for error in run_ranks_expecting_errors(2, train, Run(memory=0.01, steps=1)):
        found = re.search(r"too little for table.weight.* keeps 2 rows.* at least (\S+),", str(error))
        assert found, error
        least.add(float(found[1]))
    assert run_ranks(2, train, Run(memory=least.pop(), steps=1))  # training works with the minimum
    assert not least


def test_all_rows_at_once_are_refused(tmp_path: Path) -> None:
    table = beyond_memory(torch.randn(V, D), OPTIMIZERS["adamw"], 30, tmp_path)
    parameter: Any = table.parameter
    first = torch.tensor([3])
    reads = (lambda: parameter + 1, parameter.norm, parameter.data.to_local, lambda: parameter.data[3])
    writes = (
        parameter.data.zero_,
        lambda: torch.nn.init.zeros_(parameter),
        lambda: parameter.data.index_fill_(0, first, 0),
    )
    for ask in (*reads, *writes, table.open_gradient().memory):
        with pytest.raises(RuntimeError, match=r"expected rows by ids|[Dd]ense gradient"):
            ask()
    with pytest.raises(TierError, match="the limit allows only 30 rows"):
        table.look_up(torch.arange(31))


def full_disk(rank: int, world_size: int) -> list[float]:
    """Trains while rank 1 may write files of at most 8 KiB."""
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return train(rank, world_size, Run(schedule="none", memory=0.2, meta=True))


def test_full_disk_of_one_rank_is_an_error_on_every_rank() -> None:
    outcomes = fresh_ranks(2, full_disk)
    assert all("spill_to" in str(outcome.exception) for outcome in outcomes), outcomes


@pytest.fixture(scope="module")
def losses_in_memory(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    return run_ranks(2, train, Run(ahead=2, folder=str(tmp_path_factory.mktemp("in memory") / "saved")))


FAULTS = {
    "full disk": "writing .* bytes of rows .* File too large",
    "file cut short": "the file has only|has changed",  # the file may have grown again, with zeros
    "changed records": r"row \d+ of table.weight has changed",
    "device gone": "rows of .* cannot be read from their file",
}


@pytest.mark.parametrize("fault", long_but(("changed records",), {each: (each,) for each in (*FAULTS, "slow disk")}))
def test_fault_of_one_rank_is_an_error_on_every_rank_and_leaves_the_checkpoint(
    fault: str, tmp_path: Path, losses_in_memory: list[list[float]]
) -> None:
    run = Run(memory=0.2, ahead=2, folder=str(tmp_path / "saved"), fault=fault)
    outcomes = fresh_ranks(2, train, run)
    goes_on = run_ranks(2, train, run)
    if fault in FAULTS:
        for outcome in outcomes:
            assert re.search(FAULTS[fault], str(outcome.exception)), outcome
    else:
        assert [outcome.result for outcome in outcomes] == losses_in_memory
    assert goes_on == [losses[run.steps // 2 :] for losses in losses_in_memory]


def in_another_folder(rank: int, world_size: int, folder: str) -> None:
    os.chdir(Path(folder) / str(rank))
    train(rank, world_size, Run(memory=0.2, directory="rows"))


@pytest.mark.long
def test_directory_that_one_rank_lacks_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "0" / "rows").mkdir(parents=True)
    (tmp_path / "1").mkdir()
    for outcome in fresh_ranks(2, in_another_folder, str(tmp_path)):
        assert "on rank 1: spill_to: cannot create a file of" in str(outcome.exception)


def test_rows_read_ahead_leave_room_for_others(tmp_path: Path) -> None:
    """A call asks for as many rows as there are slots, some of which have been read ahead, with others besides."""
    values = torch.randn(V, D)
    table = beyond_memory(values, OPTIMIZERS["adamw"], 40, tmp_path)
    for first in range(0, V - 40, 40):
        table.store.memory.read_ahead(torch.arange(first, first + 5), due=1)
        asked = torch.arange(first + 3, first + 43)
        assert torch.equal(table.look_up(asked), values[asked])


def test_rows_stay_that_were_looked_up_before_the_step_they_were_due_in(tmp_path: Path) -> None:
    """Their update comes a step later; others go first that were asked for before."""
    table = beyond_memory(torch.randn(V, D), OPTIMIZERS["adamw"], 40, tmp_path)
    table.look_up(torch.arange(50, 60))
    table.store.memory.begin_step(1)
    table.store.memory.read_ahead(early := torch.arange(10), due=2)
    table.look_up(early)
    table.store.memory.begin_step(2)
    table.look_up(torch.arange(100, 120))
    table.store.memory.begin_step(3)
    table.store.memory.read_ahead(torch.arange(200, 210), due=5)
    before = table.store.memory.counts.missed
    table.begin_step().finish([(early, torch.ones(10, D))])
    assert table.store.memory.counts.missed == before
