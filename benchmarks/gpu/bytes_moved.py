"""Bytes that any implementation of a Triton kernel has to read and write: a floor for its time."""

from __future__ import annotations


def move_columns(rows: int, columns: int, itemsize: int) -> int:
    """Each row read once and written once."""
    return rows * 2 * columns * itemsize


def coalesce(rows: int, sums: int, columns: int, itemsize: int) -> int:
    """Ids and rows read once, distinct ids and sums written once; what the sort moves is on top of the floor."""
    return (rows + sums) * (8 + columns * itemsize)


def update(rows: int, columns: int, itemsize: int, states: int) -> int:
    """Ids and gradients read, the shard's rows and those of `states` tensors of state read and written."""
    return rows * (8 + (3 + 2 * states) * columns * itemsize)
