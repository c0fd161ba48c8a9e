"""Marks ids that are among others, which tells prior from delayed rows (EmbRace, ICPP 2022, section 4.2.2).

The ids of a batch come rank after rank, sorted within a rank only. Rather than sort them, one mark per row of the table
is written for the one set and read for the other; the mark is a number that changes from call to call, so that none
has to be erased.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from embrace_fx.runtime.kernels.gpu.tiles import on_its_device, refuse_strided

_IDS_PER_PROGRAM = 1024
"""8 for each thread of 4 warps."""

STAMPS = 255
"""Calls after which the marks have to be erased."""


# Bound by the latency of single bytes anywhere in the marks: small programs, many of them.
@triton.jit(do_not_specialize=["count", "stamp"])
def _mark(marks, ids, count, stamp, IDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    row = tl.load(ids + at, mask=at < count, other=0)
    # Several programs may write one mark; all write the same.
    tl.store(marks + row, tl.full((IDS,), stamp, tl.uint8), mask=at < count)


@triton.jit(do_not_specialize=["count", "stamp"])
def _marked(marks, ids, found, count, stamp, IDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    row = tl.load(ids + at, mask=at < count, other=0)
    mark = tl.load(marks + row, mask=at < count, other=0)
    tl.store(found + at, mark.to(tl.int32) == stamp, mask=at < count)


@on_its_device
def split_prior_delayed(ids: Tensor, others: Tensor, marks: Tensor, stamp: int) -> Tensor:
    """(R,) bool: which of `ids` are among `others`; of a batch and the next one, the prior rows.

    Args:
        ids: (R,) int64, from 0 to V - 1, in any order.
        others: (R',) int64, likewise.
        marks: (V,) uint8, written; none of them is `stamp`.
        stamp: from 1 to `STAMPS`.

    Raises:
        ValueError: an argument is not contiguous.
    """
    refuse_strided("split_prior_delayed", ids=ids, others=others, marks=marks)
    found = torch.empty_like(ids, dtype=torch.bool)
    if others.numel():
        _mark[(triton.cdiv(others.numel(), _IDS_PER_PROGRAM),)](
            marks, others, others.numel(), stamp, IDS=_IDS_PER_PROGRAM
        )
    if ids.numel():
        _marked[(triton.cdiv(ids.numel(), _IDS_PER_PROGRAM),)](
            marks, ids, found, ids.numel(), stamp, IDS=_IDS_PER_PROGRAM
        )
    return found
