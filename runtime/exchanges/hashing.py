"""Zen's hash of indices to servers, and its hash bitmap (OSDI 2025, arXiv 2309.13254).

Contract
    `server_of` maps an index to the same server on every rank, with even load for any skew of the indices.
    `hash_bitmap` encodes the indices of a server with one bit for each possible index.

Integers are 64 bits wide and wrap; the same functions in unsigned arithmetic give the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_FIRST = 0xFF51AFD7ED558CCD - 2**64
_SECOND = 0xC4CEB9FE1A85EC53 - 2**64
"""Multipliers of MurmurHash3's 64-bit finaliser, as signed numbers."""


def murmur(ids: Tensor, seed: int) -> Tensor:
    """Hashes ids (K,) int64 with the 64-bit finalizer of MurmurHash3, after mixing in `seed`. Different ids have
    different hashes.
    """
    key = (seed + 1 + 2**63) % 2**64 - 2**63  # wraps to 64 bits; adds 1, because the finalizer maps zero to zero
    return _mix_bits(ids ^ _mix_bits(torch.tensor(key, device="cpu")))


def _mix_bits(x: Tensor) -> Tensor:
    """Mixes the bits of 64-bit hashes `x`, so that each input bit can change all output bits."""
    x = (x ^ _shift_right_33(x)) * _FIRST
    x = (x ^ _shift_right_33(x)) * _SECOND
    return x ^ _shift_right_33(x)


def _shift_right_33(x: Tensor) -> Tensor:
    """Shifts `x` right by 33 bits, filling with zeros. Torch's own shift fills with the sign bit."""
    return (x >> 33) & (2**31 - 1)


def server_of(ids: Tensor, servers: int, seed: int) -> Tensor:
    """Returns the server (K,) to which each id (K,) is assigned, the same on all ranks. This is the hash function h0 of
    Zen.
    """
    return ((murmur(ids, seed) >> 1) & (2**63 - 1)) % servers


@lru_cache(maxsize=64)
def index_sets(num_ids: int, servers: int, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """Returns, for each server, the ids from 0 to num_ids - 1 that are assigned to it, in ascending order. These are
    the index sets I_i of Zen.

    The result takes 8 bytes per id. It is cached because computing it sorts all ids.
    """
    ids = torch.arange(num_ids, device=device)
    server = server_of(ids, servers, seed)
    counts: list[int] = torch.bincount(server, minlength=servers).tolist()
    sets: tuple[Tensor, ...] = torch.argsort(server, stable=True).split(counts)
    return sets


def hash_bitmap(ids: Tensor, index_set: Tensor) -> Tensor:
    """Encodes ids as a bitmap over an index set. Returns a tensor (ceil(I / 8),) of dtype uint8, in which bit p % 8 of
    byte p // 8 is set if `ids` contains the id at position p of the index set.

    Args:
        ids: (K,), ids from the index set, ascending.
        index_set: (I,), ascending.
    """
    bits = ids.new_zeros((-(-index_set.numel() // 8) * 8,), dtype=torch.uint8)
    bits[torch.searchsorted(index_set, ids.contiguous())] = 1
    return (bits.view(-1, 8) << _bit_numbers(ids.device)).sum(dim=1, dtype=torch.uint8)


def ids_of_bitmap(bitmap: Tensor, index_set: Tensor) -> Tensor:
    """Returns the ids of an index set whose bits are set in a bitmap. This is the inverse of `hash_bitmap`."""
    bits = (bitmap.unsqueeze(1) >> _bit_numbers(bitmap.device)) & 1
    return index_set[bits.view(-1)[: index_set.numel()] != 0]


def _bit_numbers(device: torch.device) -> Tensor:
    """Returns a tensor of the numbers 0 to 7, one for each bit of a byte."""
    return torch.arange(8, dtype=torch.uint8, device=device)
