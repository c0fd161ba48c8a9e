"""Encodes rows with their indices as bytes, one record per row, so that one message carries both.

    record = | index, 4 or 8 bytes | d values |

This is the COO format, with an index for every row. Encoding runs on the rows' device, without a copy through the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embrace_fx.cost.blocks import index_bytes, record_bytes


def index_dtype(limit: int) -> torch.dtype:
    """Returns the smallest dtype in which indices from 0 to `limit` can be sent."""
    return torch.int32 if index_bytes(limit) == 4 else torch.int64


def encode_records(indices: Tensor, rows: Tensor, limit: int) -> Tensor:
    """Encodes rows and their indices as records, and returns them as a tensor (K, bytes per record) of dtype uint8.

    Args:
        indices: (K,) int64, from 0 to `limit`.
        rows: (K, d).
        limit: an upper bound of all indices on all ranks.
    """
    narrow = indices.to(index_dtype(limit)).unsqueeze(1)
    return torch.cat([row_bytes(narrow), row_bytes(rows)], dim=1)


def row_bytes(rows: Tensor) -> Tensor:
    """Views rows (K, d) of any dtype as bytes. Returns a tensor (K, bytes per row) of dtype uint8."""
    # Set the strides, because a dimension of size one or zero may have any stride, and a view as bytes rejects that.
    return rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)


def decode_records(flat: Tensor, limit: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decodes records to indices (K,) of dtype int64 and rows (K, width). The rows are a view of `flat` if possible.

    Args:
        flat: the records, as a flat tensor of bytes.
        limit: the upper bound of the indices that was passed to `encode_records`.
        width: the number of elements in a row.
        dtype: the dtype of the rows.
    """
    index = index_dtype(limit)
    size = record_bytes(limit, width, dtype.itemsize)
    records = flat.view(-1, size)
    indices = records[:, : index.itemsize].clone(memory_format=torch.contiguous_format).view(index)
    if index.itemsize % dtype.itemsize == 0 and flat.storage_offset() % dtype.itemsize == 0:
        rows = flat.view(dtype).view(-1, size // dtype.itemsize)[:, index.itemsize // dtype.itemsize :]
    else:  # copy, because viewing bytes as a wider dtype needs an aligned address
        rows = records[:, index.itemsize :].clone(memory_format=torch.contiguous_format).view(dtype)
    return indices.view(-1).to(torch.int64), rows
