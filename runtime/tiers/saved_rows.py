"""Saves and loads the rows of a table beyond memory in a checkpoint, with the steps that they have skipped.

A rank writes its columns of the rows that differ from their first values, ascending, some at a time. A loading rank
reads the files of all ranks whose columns it needs, side by side. No whole table is in memory.

Shape legend: K rows; a rank's columns of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from embrace_fx.runtime.tiers.record_file import TierError
from embrace_fx.runtime.tiers.records import Column, Records
from embrace_fx.runtime.tiers.tiered_table import TieredTable


def save_rows(table: TieredTable, path: Path) -> int:
    """Writes this rank's rows to a file; returns their number. No update may be pending."""
    count = 0
    with path.open("wb") as file:
        for rows, records in table.moved():
            file.write(records.numpy().data)
            count += rows.numel()
        file.flush()
        os.fsync(file.fileno())
    return count


def load_rows(table: TieredTable, paths: Sequence[Path], cuts: Sequence[range], own: range) -> int:
    """Replaces all rows of a table by those of a checkpoint; returns their number.

    Args:
        paths: the files that ranks have written.
        cuts: the columns in each file.
        own: this rank's columns.

    Raises:
        TierError: a file is broken.
    """
    shared = {k: range(max(cut.start, own.start), min(cut.stop, own.stop)) for k, cut in enumerate(cuts)}
    needed = [k for k in shared if shared[k]] or [0]
    count, columns = 0, table.memory.records.columns
    table.memory.forget(table.rows)
    with ExitStack() as stack:
        chunks = [_chunks(columns, paths[k], len(cuts[k]), table.memory.part, stack) for k in needed]
        for chunk in zip(*chunks, strict=True):
            (rows, *others), parts = zip(*chunk, strict=True)
            if not all(torch.equal(each, rows) for each in others):
                raise TierError(_BROKEN.format(paths[0].parent, "files of different rows"))
            values = {key: parts[0][key] for key in columns}
            for key in [key for key, column in columns.items() if column.size]:
                pieces = [
                    part[key][:, shared[k].start - cuts[k].start :][:, : len(shared[k])]
                    for k, part in zip(needed, parts, strict=True)
                ]
                values[key] = torch.cat(pieces, 1)
            table.memory.store(table.numbers(rows), values)
            count += rows.numel()
    return count


def _chunks(
    columns: Mapping[str, Column], path: Path, width: int, part: int, stack: ExitStack
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yields rows (K,) of a file and their columns (K, ...), a part at a time."""
    file = stack.enter_context(path.open("rb"))
    records = Records({k: replace(c, size=(width,)) if c.size else c for k, c in columns.items()})
    data = torch.empty(records.nbytes * part, dtype=torch.uint8, device="cpu")
    while size := file.readinto(data.numpy().data):
        if size % records.nbytes:
            raise TierError(_BROKEN.format(path, "a record cut short"))
        read = data[:size].view(-1, records.nbytes)
        if bool((wrong := records.wrong(read)).any()):
            raise TierError(_BROKEN.format(path, f"other bytes in {int(wrong.sum())} records"))
        yield records.rows(read), records.unpack(read)


_BROKEN = "expected rows of a table as a checkpoint has them, in {}, found {}. Load an earlier checkpoint."
