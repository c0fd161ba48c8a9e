"""Measures how long reading and writing a row takes: on disk in the user's directory, or in host memory for a
device.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from embrace_fx.runtime.tiers.record_file import HostRecords, RecordFile
from embrace_fx.runtime.tiers.records import WEIGHTS, Records

READ_ROWS, APART_BYTES, WRITTEN_BYTES = 128, 1 << 20, 1 << 20
"""The number of rows to read; their distance, so that no two share a page; the bytes of one write."""


def measure_disk(directory: str | Path, records: Records) -> tuple[float, float]:
    """Measures the disk without the kernel's page cache. Returns (milliseconds to read a row, milliseconds to write a
    row).

    Args:
        directory: the folder for the temporary file.
        records: the format of a row in the file.

    Raises:
        TierError: rows cannot be written to the folder or read from it.
    """
    apart, run = -(-APART_BYTES // records.nbytes), max(1, WRITTEN_BYTES // records.nbytes)
    file = RecordFile(directory, "a probe", READ_ROWS * apart + run, records)
    rows = torch.arange(0, READ_ROWS * apart, apart, device="cpu")
    file.write(rows, _sample_records(rows, records))
    os.fdatasync(file.descriptor)
    written = torch.arange(run, device="cpu")
    packed, written = _sample_records(written, records), written + READ_ROWS * apart
    began = time.perf_counter()
    file.write(written, packed)
    os.fdatasync(file.descriptor)
    write_ms = (time.perf_counter() - began) * 1e3 / run
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    file.read(rows)
    return (time.perf_counter() - began) * 1e3 / READ_ROWS, write_ms


def measure_host(records: Records) -> tuple[float, float]:
    """Returns (milliseconds to gather a row from host memory into pinned memory, milliseconds to write a row back).

    Args:
        records: the format of a row in host memory.
    """
    apart = -(-APART_BYTES // records.nbytes)
    rest, rows = HostRecords(READ_ROWS * apart, records), torch.arange(0, READ_ROWS * apart, apart, device="cpu")
    packed, took_ms = _sample_records(rows, records), (0.0, 0.0)
    for _ in range(2):  # the first run also allocates memory
        began = time.perf_counter()
        rest.write(rows, packed)
        written = time.perf_counter()
        rest.read(rows)
        took_ms = (time.perf_counter() - written) * 1e3 / READ_ROWS, (written - began) * 1e3 / READ_ROWS
    return took_ms


def _sample_records(rows: Tensor, records: Records) -> Tensor:
    """Returns records with the ids `rows` (K,) and initial values, for a measurement."""
    return records.pack(rows, {WEIGHTS: records.columns[WEIGHTS].filled(rows.numel())})
