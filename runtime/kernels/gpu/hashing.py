"""Hashes ids to servers as Zen does (OSDI 2025, arXiv 2309.13254, section 3.2).

Bit for bit the hashes of `runtime/exchanges/hashing.py`: every rank must send an id to the same server, whatever it
computes on. Hashing is 64-bit integer arithmetic on ids that are read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from embrace_fx.runtime.kernels.gpu.tiles import IDS_PER_PROGRAM, on_its_device, refuse_strided

_MASK = 2**64 - 1
_MULTIPLIERS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)  # MurmurHash3's 64-bit finaliser


@triton.jit
def _finalise(x):
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 33)


@triton.jit
def _below(ids, key, limit):
    """Hashes ids to numbers from 0 to limit - 1; `key` is the mixed-in seed."""
    hashed = _finalise(ids.to(tl.uint64, bitcast=True) ^ tl.full(ids.shape, key, tl.int64).to(tl.uint64, bitcast=True))
    return (hashed >> 1).to(tl.int64, bitcast=True) % limit


def _key(seed: int) -> int:
    """`_finalise` of a seed, on the host, as a signed number."""
    x = (seed + 1) & _MASK
    for multiplier in _MULTIPLIERS:
        x = (x ^ (x >> 33)) * multiplier & _MASK
    x ^= x >> 33
    return x - 2**64 if x >= 2**63 else x


@triton.jit(do_not_specialize=["count", "servers", "key"])
def _server_of(ids, out, count, servers: tl.int64, key: tl.int64, IDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    tl.store(out + at, _below(tl.load(ids + at, mask=at < count, other=0), key, servers), mask=at < count)


@on_its_device
def server_of(ids: Tensor, servers: int, seed: int) -> Tensor:
    """Zen's h0: (K,) int64 ids, contiguous, to (K,) servers, the same on all ranks and devices.

    Raises:
        ValueError: the ids are not contiguous.
    """
    refuse_strided("server_of", ids=ids)
    out = torch.empty_like(ids)
    if ids.numel():
        _server_of[(triton.cdiv(ids.numel(), IDS_PER_PROGRAM),)](
            ids, out, ids.numel(), servers, _key(seed), IDS=IDS_PER_PROGRAM
        )
    return out
