"""The time that a row takes to its file and back, measured in the directory that a user names."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from embrace_fx.runtime.tiers.record_file import RecordFile
from embrace_fx.runtime.tiers.records import Records

PROBED_ROWS, APART_BYTES = 128, 1 << 20
"""Rows written and read, and how far they lie from each other: none comes with another one's page."""


def row_ms(directory: str | Path, records: Records) -> tuple[float, float]:
    """Milliseconds in which a row is read, and written: from the disk, which the kernel's cache is told to leave to it.

    Raises:
        TierError: rows cannot be written there, or read.
    """
    apart = -(-APART_BYTES // records.nbytes)
    file = RecordFile(directory, "a probe", PROBED_ROWS * apart, records)
    rows = torch.arange(0, PROBED_ROWS * apart, apart, device="cpu")
    packed = records.pack(rows, {key: column.filled(PROBED_ROWS) for key, column in records.columns.items()})
    began = time.perf_counter()
    for row, record in zip(rows.tolist(), packed, strict=True):
        file.write(row, record.unsqueeze(0))
    os.fdatasync(file.descriptor)
    written = time.perf_counter()
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    asked = time.perf_counter()
    file.read(rows)
    return (time.perf_counter() - asked) * 1e3 / PROBED_ROWS, (written - began) * 1e3 / PROBED_ROWS
