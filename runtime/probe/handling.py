"""Measures how fast a rank's processor handles sparse gradients (`cost.Handling`), on synthetic rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embrace_fx.cost.links import LARGE_BLOCK_BYTES
from embrace_fx.runtime.exchanges.blocks import block_bitmap, write_blocks_
from embrace_fx.runtime.exchanges.gradient import mean_by_id
from embrace_fx.runtime.exchanges.record_codec import decode_records, encode_records

PASSES = 7
"""Passes of `do_exchange_work` over the bytes of its rows: gather, encode, clear, join, add, divide, write."""

WIDE, NARROW = 256, 1
"""Values per row: with many, the time depends on bytes; with one, on rows."""
HANDLED_ROWS = {WIDE: 1024, NARROW: 32 * 1024}
SCANNED_BYTES = LARGE_BLOCK_BYTES
"""Bytes to search, more than a cache, because a table's gradient is in memory."""
PAGE_BYTES = 4096
SPARSE = 8
"""Rows of the tensor per handled row."""


def do_exchange_work(dense: Tensor, ids: Tensor) -> None:
    """Does the processor's part of exchanging the sparse gradient of a table, to measure its time. Gathers rows,
    encodes and decodes them, sums them by id and writes them back. Sends nothing.

    Args:
        dense: (V, d), the gradient of the table.
        ids: (K,), the rows to exchange.
    """
    num_rows, width = dense.shape
    flat = encode_records(ids, dense.index_select(0, ids), num_rows).view(-1)
    found, rows = decode_records(flat, num_rows, width, dense.dtype)
    write_blocks_(dense, mean_by_id(found, rows, [found.numel()], num_rows, 1))


def make_exchange_work(width: int, rows: int, device: torch.device) -> Callable[[], None]:
    """Returns a function that runs `do_exchange_work` on `rows` rows of `width` values."""
    dense = torch.zeros((SPARSE * rows, width), device=device)
    ids = torch.arange(0, SPARSE * rows, SPARSE, device=device)
    return lambda: do_exchange_work(dense, ids)


def make_scan_work(device: torch.device) -> Callable[[], None]:
    """Returns a function that searches a tensor of `SCANNED_BYTES` for non-zero rows."""
    # Use ones, because pages of zeros could share one physical page.
    dense = torch.ones((SCANNED_BYTES // 4 // WIDE, WIDE), device=device)

    def scan() -> None:
        """Searches the tensor for non-zero rows."""
        block_bitmap(dense)

    return scan


def make_claim_work(device: torch.device) -> Callable[[], None]:
    """Returns a function that allocates a block of `LARGE_BLOCK_BYTES` and writes to each of its pages."""

    def claim() -> None:
        """Allocates a block and writes to each of its pages."""
        torch.empty(LARGE_BLOCK_BYTES, dtype=torch.uint8, device=device)[::PAGE_BYTES] = 1

    return claim
