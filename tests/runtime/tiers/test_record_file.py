"""Records come back as they were written, or an error names the row; nothing else of a disk is taken for a value."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embrace_fx.runtime.tiers.initial import normal_rows
from embrace_fx.runtime.tiers.record_file import RecordFile, RecordLog, TierError
from embrace_fx.runtime.tiers.records import Column, Records
from tests.support.golden import check_transcript, run_lines

RECORDS = Records({"weights": Column((10,), torch.float32)})
ROWS = torch.tensor([2, 3, 4, 900])


@pytest.fixture
def limited() -> Iterator[None]:
    """Limits files to 8 KiB, so that writes fail as on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def records() -> Tensor:
    return RECORDS.pack(ROWS, {"weights": torch.arange(40.0).view(4, 10)})


def put(file: RecordFile) -> None:
    """Writes one record per row, at the row's number."""
    file.write(ROWS, records())


@pytest.mark.parametrize(
    ("damage", "at"),
    [(b"\0" * 4, 28), (b"\xff" * 4, 28), (bytes(records()[0].tolist()), 0)],
    ids=["zeros", "ones", "another row"],
)
def test_changed_record_is_an_error_that_names_the_row(damage: bytes, at: int, tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "t", 1000, RECORDS)
    put(file)
    os.pwrite(file.descriptor, damage, 3 * 56 + at)
    assert torch.equal(file.read(ROWS[:1], ROWS[:1]), records()[:1])
    with pytest.raises(TierError, match="row 3 of t has changed in its file"):
        file.read(ROWS, ROWS)
    assert not list(tmp_path.iterdir()), "it has no name that anyone could take for a checkpoint"


def test_blocks_are_emptied_before_the_file_is_full() -> None:
    """Every number in use is one row's, whatever is written in which order; the file never has to grow."""
    generator, log, where = torch.Generator().manual_seed(0), RecordLog(100, 30, 4), dict[int, int]()
    for step in range(400):
        rows = torch.randperm(100 if step < 300 else 9, generator=generator)[: step % 30].tolist()
        log.free_numbers(torch.tensor([where.pop(row) for row in rows if row in where], dtype=torch.int32))
        while log.needs_empty_block(len(rows)):
            sparse = log.emptiest_block()
            moved = [row for row, number in where.items() if number in sparse]
            log.free_numbers(torch.tensor([where[row] for row in moved], dtype=torch.int32))
            where |= zip(moved, log.take_numbers(torch.tensor(moved)).tolist(), strict=True)
        where |= zip(rows, log.take_numbers(torch.tensor(rows)).tolist(), strict=True)
        assert len(set(where.values())) == len(where)
        assert max(where.values(), default=0) < log.size


def test_records_that_a_disk_has_to_be_waited_for_are_left(tmp_path: Path) -> None:
    """A page of them is dropped from the page cache, where that is possible, and read again by `read`."""
    file, rows = RecordFile(tmp_path, "t", 2000, RECORDS), torch.arange(2000)
    written = RECORDS.pack(rows, {"weights": rows.unsqueeze(1).repeat(1, 10).float()})
    file.write(rows, written)
    os.fdatasync(file.descriptor)
    some = rows[(rows % 3 > 0) & (rows != 1000)]  # includes runs of consecutive records
    records = file.read_cached(some, some)
    assert records is not None
    assert torch.equal(records, written[some])
    os.posix_fadvise(file.descriptor, 1 << 14, 1 << 14, os.POSIX_FADV_DONTNEED)
    cached = file.read_cached(some, some)
    assert cached is None or torch.equal(cached, written[some])
    assert torch.equal(file.read(some, some), written[some])


def test_file_cut_short_is_an_error(tmp_path: Path) -> None:
    file = RecordFile(tmp_path, "t", 1000, RECORDS)
    put(file)
    os.ftruncate(file.descriptor, 900 * 56 + 7)
    with pytest.raises(TierError, match=r"the file has only [\d,]+ of 50,456 bytes"):
        file.read(ROWS, ROWS)


def test_full_disk_is_an_error_that_tells_what_to_do(tmp_path: Path, limited: None) -> None:
    file = RecordFile(tmp_path, "t", 1000, RECORDS)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    with pytest.raises(TierError, match=r"writing \d+ bytes of rows .* The last checkpoint is intact"):
        put(file)


def test_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="cannot create a file of 56,000 bytes"):
        RecordFile(tmp_path / "gone", "t", 1000, RECORDS)


def test_first_values_are_normal_and_do_not_depend_on_their_company() -> None:
    rows = normal_rows(torch.arange(2000), range(8), 8, seed=5, dtype=torch.float64)
    assert abs(float(rows.mean())) < 0.02
    assert abs(float(rows.std()) - 1) < 0.02
    assert abs(float(torch.corrcoef(rows.t())[0, 1])) < 0.06
    assert torch.equal(normal_rows(torch.tensor([7, 1999]), range(3, 5), 8, 5, torch.float64), rows[[7, 1999], 3:5])
    assert not torch.equal(normal_rows(torch.tensor([7]), range(8), 8, 6, torch.float64), rows[7:8])


def test_bookkeeping_does_what_its_transcript_shows() -> None:
    modules = ("budget", "initial", "record_file", "records", "slots", "slot_history")
    check_transcript("tiers", partial(run_lines, "runtime.tiers", (*modules, "working_set")))
