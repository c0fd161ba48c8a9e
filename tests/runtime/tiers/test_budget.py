"""A working set takes no more of memory, by the kernel's counter, than it was asked to keep to."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embrace_fx.runtime.tiers.budget import Tier
from embrace_fx.runtime.tiers.initial import InitialValues, InitialValuesOfTables
from embrace_fx.runtime.tiers.record_file import RecordFile
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS, Column
from embrace_fx.runtime.tiers.working_set import WorkingSet
from tests.support.ranks import fresh_ranks

STATUS, ROWS, STEPS = Path("/proc/self/status"), 100_000, 8


def anonymous_bytes() -> int:
    """Returns the bytes of this process's memory that are not backed by a file."""
    found = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(found.split()[1])


def columns_of(width: int) -> dict[str, Column]:
    of = Column((width,), torch.float32)
    return {WEIGHTS: of, TAKEN: Column((), torch.int64), "exp_avg": of, "exp_avg_sq": of}


def begin(budget: int, width: int, directory: str) -> WorkingSet:
    columns = columns_of(width)
    initial = InitialValuesOfTables({0: InitialValues(range(width), width, torch.float32)})
    return WorkingSet("t", ROWS, Tier(budget, budget, columns).slots(ROWS, "t"), columns, initial, directory)


def use(memory: WorkingSet, told: list[Tensor], asked: list[Tensor]) -> Iterator[None]:
    """Tells of more rows than there is room for, asks for many others, of which most are to begin or to be read, and
    writes all; the page cache loses some. Then all rows are saved, and forgotten."""
    for step, ids in enumerate(asked):
        memory.begin_step(step)
        for ahead in (1, 2, 3):
            memory.read_ahead(told[(step + ahead) % len(told)], step + ahead)
            yield
        slots = memory.places(ids, to_write=True)
        memory.columns[TAKEN].index_fill_(0, slots, step + 1)
        if step % 3 == 2:
            assert isinstance(memory.file, RecordFile)
            os.posix_fadvise(memory.file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        yield
    for _ in memory.changed_rows(range(ROWS)):
        yield
    memory.forget(range(ROWS))
    yield


def grown(rank: int, world_size: int, budget: int, width: int, directory: str) -> tuple[int, int]:
    """Returns the largest growth of this process in bytes, and the bytes that the working set allocates at first."""
    few = [torch.randint(ROWS, (100,)) for _ in range(STEPS)]
    for _ in use(begin(ROWS * 5 + (1 << 20), width, directory), few, few):
        pass
    slots = Tier(budget, budget, columns_of(width)).slots(ROWS, "t")
    told, asked = ([torch.randint(ROWS, (slots // part,)) for _ in range(STEPS)] for part in (1, 2))
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous_bytes()
    memory = begin(budget, width, directory)
    most = max(anonymous_bytes() for _ in use(memory, told, asked))
    return most - before, memory.nbytes


@pytest.mark.skipif(not STATUS.exists(), reason="a counter of Linux")
@pytest.mark.parametrize(("width", "budget"), [(16, 14 << 20), (128, 16 << 20)])
def test_memory_stays_within_its_budget(width: int, budget: int, tmp_path: Path) -> None:
    outcome = fresh_ranks(1, grown, budget, width, str(tmp_path))[0]
    assert outcome.exception is None, outcome
    assert outcome.result is not None
    most, nbytes = outcome.result
    assert 0.7 * budget < nbytes <= most <= budget
