"""Who writes rows that leave memory: whoever has them leave, and a thread once a write has had to wait."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.tiers import file_thread
from embrace_fx.runtime.tiers.file_thread import FileThread
from embrace_fx.runtime.tiers.record_file import RecordFile
from embrace_fx.runtime.tiers.records import WEIGHTS, Column, Records
from embrace_fx.runtime.tiers.slots import Slots

ROWS, D = 64, 4
MAIN = threading.get_ident()


class Rest(RecordFile):
    """Records which thread wrote. A write takes `takes` seconds, and fails if there is an `error`."""

    def __init__(self, directory: Path, records: Records) -> None:
        super().__init__(directory, "table", ROWS, records)
        self.records = records
        self.writers: list[int] = []
        self.takes, self.error = 0.0, ""

    def write(self, numbers: Tensor, records: Tensor) -> None:
        self.writers.append(threading.get_ident())
        time.sleep(self.takes)
        if self.error:
            raise OSError(self.error)
        super().write(numbers, records)


@pytest.fixture
def rest(tmp_path: Path) -> Rest:
    return Rest(tmp_path, Records({WEIGHTS: Column((D,), torch.float32)}))


@pytest.fixture
def thread(rest: Rest) -> FileThread:
    slots = Slots(ROWS, rest.records)
    slots.columns[WEIGHTS].copy_(torch.arange(ROWS * D).view(ROWS, D))
    return FileThread("table", rest, rest.records, slots, ROWS, Recorder)


def write(thread: FileThread, *rows: int) -> None:
    numbers = torch.tensor(rows)
    thread.write(numbers, numbers, partial(thread._slots.copy_out, numbers))


def read(thread: FileThread, rest: Rest, *rows: int) -> list[list[float]]:
    return rest.records.unpack(thread.read(torch.tensor(rows)))[WEIGHTS].tolist()


def test_quick_writes_are_their_callers(thread: FileThread, rest: Rest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_thread, "_LATE_S", 10.0)
    write(thread, 0, 1)
    write(thread, 2)
    assert rest.writers == [MAIN, MAIN]
    assert read(thread, rest, 1, 2) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_writes_behind_one_that_waited_are_the_threads(
    thread: FileThread, rest: Rest, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest.takes = 0.03
    write(thread, 0)
    rest.takes = 0.005
    monkeypatch.setattr(file_thread, "_LATE_S", 10.0)
    for value in range(file_thread._BY_THREAD + 1):  # the last write is queued behind others
        thread._slots.columns[WEIGHTS][1] = value
        write(thread, 1)
    assert read(thread, rest, 0, 1) == [[0, 1, 2, 3], [value] * D]
    assert rest.writers[0] == MAIN
    assert MAIN not in rest.writers[1:]
    thread.await_writes()
    write(thread, 2)
    assert rest.writers[-1] == MAIN


def test_failed_write_is_told_to_whoever_waits(thread: FileThread, rest: Rest) -> None:
    rest.error = "no room"
    write(thread, 0)
    with pytest.raises(OSError, match="no room"):
        thread.await_writes()
