"""Zen's hierarchical hashing (OSDI 2025, arXiv 2309.13254, section 3.2): which server an id goes to, and which slot.

Bit for bit the hashes of `runtime/exchanges/hashing.py`: every rank must send an id to the same server, whatever it
computes on. Hashing is 64-bit integer arithmetic on ids that are read once; slots lie anywhere, so that `claim_slots`
is bound by the latency of 8-byte accesses, most of them to the L2 cache.
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


@triton.jit
def _pending(ids, placed, count, servers, parallel, server_key, slot_key, IDS: tl.constexpr):
    """Positions of a program's ids, which of them have no slot yet, and the slot that each of those tries."""
    at = tl.program_id(0).to(tl.int64) * IDS + tl.arange(0, IDS)
    pending = (at < count) & (tl.load(placed + at, mask=at < count, other=1) == 0)
    tried = tl.load(ids + at, mask=pending, other=0)
    return at, pending, _below(tried, server_key, servers) * parallel + _below(tried, slot_key, parallel)


# As in the paper no slot is locked: all whose slot is free write into it, and at the next launch, by when all have
# written, read back who won. Who wins may differ from run to run; that somebody does, and nobody is lost, does not.
@triton.jit(do_not_specialize=["count", "servers", "parallel", "server_key", "slot_key"])
def _claim(
    ids, placed, slots, count, servers: tl.int64, parallel: tl.int64, server_key: tl.int64, slot_key: tl.int64,
    IDS: tl.constexpr,
):  # fmt: skip
    at, pending, slot = _pending(ids, placed, count, servers, parallel, server_key, slot_key, IDS)
    free = tl.load(slots + slot, mask=pending, other=0) < 0
    tl.store(slots + slot, at, mask=pending & free)


@triton.jit(do_not_specialize=["count", "servers", "parallel", "server_key", "slot_key"])
def _confirm(
    ids, placed, slots, count, servers: tl.int64, parallel: tl.int64, server_key: tl.int64, slot_key: tl.int64,
    IDS: tl.constexpr,
):  # fmt: skip
    at, pending, slot = _pending(ids, placed, count, servers, parallel, server_key, slot_key, IDS)
    won = tl.load(slots + slot, mask=pending, other=-1) == at
    tl.store(placed + at, tl.full((IDS,), 1, tl.uint8), mask=pending & won)


@on_its_device
def claim_slots(ids: Tensor, servers: int, parallel: int, seed: int, attempts: int) -> tuple[Tensor, Tensor]:
    """Zen's parallel region: h1 .. hk choose a slot among those of the server h0 chose; who finds it taken tries on.

    Args:
        ids: (K,) int64, contiguous, no two the same.
        servers: number of servers.
        parallel: slots of each (the paper's r1).
        seed: of the hash functions; attempt a uses seed + a.
        attempts: k.

    Returns:
        slots (servers * parallel,) int64, the position in `ids` of the one that holds it, or -1; and the positions of
        those left over, ascending, for the serial region.

    Raises:
        ValueError: the ids are not contiguous.
    """
    refuse_strided("claim_slots", ids=ids)
    slots = ids.new_full((servers * parallel,), -1)
    placed = torch.zeros_like(ids, dtype=torch.uint8)
    if ids.numel():
        grid = (triton.cdiv(ids.numel(), IDS_PER_PROGRAM),)
        for attempt in range(1, attempts + 1):
            arguments = (ids, placed, slots, ids.numel(), servers, parallel, _key(seed), _key(seed + attempt))
            _claim[grid](*arguments, IDS=IDS_PER_PROGRAM)
            _confirm[grid](*arguments, IDS=IDS_PER_PROGRAM)
    return slots, (placed == 0).nonzero().view(-1)
