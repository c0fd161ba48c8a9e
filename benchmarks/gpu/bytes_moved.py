"""Bytes that any implementation of a Triton kernel has to read and write: a floor for its time."""

from __future__ import annotations


def move_columns(rows: int, columns: int, itemsize: int) -> int:
    """Returns the bytes to read each row once and write it once."""
    return rows * 2 * columns * itemsize


def coalesce(rows: int, sums: int, columns: int, itemsize: int) -> int:
    """Returns the bytes to read ids and rows once, and write distinct ids and sums once. The bytes moved by the sort
    are not included.
    """
    return (rows + sums) * (8 + columns * itemsize)


def update(rows: int, columns: int, itemsize: int, states: int) -> int:
    """Returns the bytes to read ids and gradients, and to read and write the rows of the shard and of `states` state
    tensors.
    """
    return rows * (8 + (3 + 2 * states) * columns * itemsize)
