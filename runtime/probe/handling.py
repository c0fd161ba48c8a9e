"""Measures `cost.Handling`: a processor's work in a sparse exchange, on rows made up for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embrace_fx.cost.links import LARGE_BLOCK_BYTES
from embrace_fx.runtime.exchanges.blocks import block_bitmap, write_blocks_
from embrace_fx.runtime.exchanges.gradient import mean_by_id
from embrace_fx.runtime.exchanges.records import decode_records, encode_records

PASSES = 7
"""Of `handle` over the bytes of its rows: gathered, encoded, cleared, put together, added, divided, written."""

WIDE, NARROW = 256, 1
"""Values of a row: what it takes is the bytes, or that it is a row."""
HANDLED_ROWS = {WIDE: 1024, NARROW: 32 * 1024}
SCANNED_BYTES = LARGE_BLOCK_BYTES
"""More than a cache holds: a table's gradient comes from memory."""
PAGE_BYTES = 4096
SPARSE = 8
"""Rows of the tensor for each that is handled."""


def handle(dense: Tensor, ids: Tensor) -> None:
    """Gathers rows of (V, d), encodes and decodes them as a message, adds them up and writes them, by `ids` (K,)."""
    num_rows, width = dense.shape
    flat = encode_records(ids, dense.index_select(0, ids), num_rows).view(-1)
    found, rows = decode_records(flat, num_rows, width, dense.dtype)
    write_blocks_(dense, mean_by_id(found, rows, [found.numel()], num_rows, 1))


def handling_of(width: int, rows: int, device: torch.device) -> Callable[[], None]:
    """`handle` of so many rows, each of so many values."""
    dense = torch.zeros((SPARSE * rows, width), device=device)
    ids = torch.arange(0, SPARSE * rows, SPARSE, device=device)
    return lambda: handle(dense, ids)


def scanning(device: torch.device) -> Callable[[], None]:
    """A search of `SCANNED_BYTES` for rows that are not zero."""
    dense = torch.ones((SCANNED_BYTES // 4 // WIDE, WIDE), device=device)  # zeros could be one page, seen many times

    def scan() -> None:
        block_bitmap(dense)

    return scan


def claiming(device: torch.device) -> Callable[[], None]:
    """The first write to each page of a block of `LARGE_BLOCK_BYTES`."""

    def claim() -> None:
        torch.empty(LARGE_BLOCK_BYTES, dtype=torch.uint8, device=device)[::PAGE_BYTES] = 1

    return claim
