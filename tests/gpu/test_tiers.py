"""A table beyond a device's memory trains as the same table in it, to the bit: from its host's memory, from a file."""

from __future__ import annotations

import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import embrace_fx
from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.runtime.tiers.slots import Arrival, DeviceSlots
from tests.gpu.needs import emulated, findings_of, gpus, host_waits, set_sync_debug_mode
from tests.support.inside import session_of
from tests.support.ranks import RankError, run_ranks
from tests.support.tiers import OPTIMIZERS, OneTable, Run, batches, train

pytestmark = pytest.mark.timeout(900)

IN_HOST, IN_FILE = "", tempfile.gettempdir()
ROWS, STEPS = 2000, 16
ON_DEVICE = Run(rows=ROWS, steps=STEPS, on_device=True, directory=IN_HOST)


@cache
def in_memory(ranks: int, run: Run) -> list[list[float]]:
    return run_ranks(ranks, train, replace(run, memory=None, directory=IN_HOST), timeout_s=400.0)


def check(ranks: int, run: Run) -> None:
    assert run_ranks(ranks, train, run, timeout_s=400.0) == in_memory(ranks, run)


@gpus(1)
def test_brief() -> None:
    check(1, replace(ON_DEVICE, memory=0.1, rows=200, steps=6, ahead=2))


@gpus(2)
def test_brief_of_a_file_whose_blocks_are_emptied() -> None:
    check(2, replace(ON_DEVICE, zipf=False, memory=0.02, directory=IN_FILE))


@gpus(2)
@pytest.mark.parametrize("directory", [IN_HOST, IN_FILE], ids=["host", "file"])
@pytest.mark.parametrize("memory", [0.5, 0.1, 0.02])
@pytest.mark.parametrize("zipf", [True, False], ids=["zipf", "random"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "adagrad"])
def test_two_ranks(optimizer: str, zipf: bool, memory: float, directory: str) -> None:
    check(2, replace(ON_DEVICE, optimizer=optimizer, zipf=zipf, memory=memory, directory=directory))


@gpus(1)
@pytest.mark.parametrize("directory", [IN_HOST, IN_FILE], ids=["host", "file"])
@pytest.mark.parametrize("memory", [0.5, 0.1, 0.02])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "adagrad"])
def test_one_rank(optimizer: str, memory: float, directory: str) -> None:
    check(1, replace(ON_DEVICE, optimizer=optimizer, memory=memory, directory=directory, ahead=3))


@gpus(2)
@pytest.mark.parametrize("schedule", ["none", "2d"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("ahead", [1, 3])
def test_schedules_and_batches_ahead(ahead: int, ranks: int, schedule: str) -> None:
    check(ranks, replace(ON_DEVICE, schedule=schedule, memory=0.1, ahead=ahead))


@gpus(2)
@pytest.mark.parametrize("directory", [IN_HOST, IN_FILE], ids=["host", "file"])
def test_checkpoint_is_resumed_on_devices(directory: str, tmp_path: Path) -> None:
    run = replace(ON_DEVICE, memory=0.1, directory=directory, folder=str(tmp_path / "saved"))
    expected = in_memory(2, replace(run, folder=str(tmp_path / "in memory")))
    assert run_ranks(2, train, run, timeout_s=400.0) == expected
    assert run_ranks(2, train, run, timeout_s=400.0) == [losses[STEPS // 2 :] for losses in expected]


@gpus(2)
def test_table_on_the_meta_device_does_not_depend_on_its_place() -> None:
    in_host, in_file = (
        run_ranks(2, train, replace(ON_DEVICE, meta=True, memory=memory, directory=directory), timeout_s=400.0)
        for memory, directory in ((0.1, IN_HOST), (0.9, IN_FILE))
    )
    assert in_host == in_file


def steady(rank: int, world_size: int) -> list[int]:
    """Waits of steady steps in which rows come and leave: of the host for streams and copies, of its own for events."""
    device, events = torch.device("cuda", rank), list[object]()
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model, reach = OneTable(rows=ROWS).to(device), Streams.wait_on_host

    def noted(self: Streams, event: Any) -> None:
        events.extend([event] * (threading.current_thread() is threading.main_thread() and not event.query()))
        reach(self, event)

    optimizer = OPTIMIZERS["adagrad"](model.parameters())
    group = torch.distributed.new_group(backend="nccl") if world_size > 1 else None
    asked: Any = {"strategy": "alltoall", "table_memory": 0.1, "process_group": group}
    compiled = embrace_fx.compile(model, optimizer=optimizer, **asked)
    loaded = [(ids.to(device),) for (ids,) in batches(rank, LAST + 3, zipf=False, rows=ROWS)]
    before, waits = host_waits(), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Streams, "wait_on_host", noted)
        for step, batch in enumerate(compiled.lookahead(loaded, 1 if world_size > 1 else 3)):
            if step == FIRST:
                set_sync_debug_mode("error")
                before = host_waits()
                events.clear()
            compiled(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == LAST:
                set_sync_debug_mode("default")
                streams, _, copies = (now - then for now, then in zip(host_waits(), before, strict=True))
                waits = [streams, copies, len(events)]
    table: Any = session_of(compiled).state.tables["table.weight"]
    assert table.store.memory.counts.written > 0
    compiled.close()
    return waits


FIRST, LAST = 20, 30
"""Steps that are neither profiled, nor the first of their kind, nor near the end."""


@emulated
@gpus(2)
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_come_and_leave_without_the_host(ranks: int) -> None:
    for streams, copies, events in run_ranks(ranks, steady, timeout_s=400.0):
        assert streams == copies == 0
        assert events <= 2 * (LAST + 1 - FIRST)  # two per step: for the next batch's sizes, and for the finite flag


def does_not_wait(rank: int, world_size: int, run: Run) -> list[float]:
    """Trains with a planted bug: rows are put into their slots before their copy has ended."""

    def arrive(self: DeviceSlots, coming: Arrival) -> None:
        self.put(*coming.copied)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceSlots, "arrive", arrive)
        return train(rank, world_size, run)


@emulated
@gpus(1)
def test_a_wait_that_is_left_out_is_found(findings: Path) -> None:
    with suppress(RankError):  # without the wait, values are undefined and may raise
        run_ranks(1, does_not_wait, replace(ON_DEVICE, memory=0.1, rows=200, steps=6, ahead=2), timeout_s=400.0)
    assert "nothing orders the two" in findings_of(findings)


def lacks_host_memory(rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("embrace_fx.planning.tiering.available_bytes", lambda: 1000)
        train(rank, world_size, replace(ON_DEVICE, memory=0.1))


@gpus(1)
def test_host_that_lacks_room_is_an_error() -> None:
    with pytest.raises(RankError, match=r"rows of table.weight in the memory of .* takes .* but only 1,000 bytes"):
        run_ranks(1, lacks_host_memory, timeout_s=400.0)
