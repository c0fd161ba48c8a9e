"""Hierarchical hashing and the hash bitmap of Zen (OSDI 2025, arXiv 2309.13254).

In torch ops, for any device; on CUDA by the kernels of `runtime/kernels/gpu`, which hash to the same bits.

Contract
    Level one, `server_of`, sends an index to the same server on every rank, whatever the skew of the indices. Level
    two, `hash_partition`, groups one rank's indices by server without sorting them, and loses none. `hash_bitmap`
    says which indices a server has, in one bit for each it could have.

Integers are 64 bits wide and wrap; the same functions in unsigned arithmetic give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from embrace_fx.runtime.kernels import gpu

REHASHES = 3
"""Hash functions tried before an index goes to the serial region (Zen's k)."""
SLOTS_PER_INDEX = 2
"""Size of the hash memory, which decides the first collision rate (Zen's r1 = 2 |G| d)."""

_FIRST = 0xFF51AFD7ED558CCD - 2**64
_SECOND = 0xC4CEB9FE1A85EC53 - 2**64
"""Multipliers of MurmurHash3's 64-bit finaliser, as signed numbers."""


def murmur(ids: Tensor, seed: int) -> Tensor:
    """Hashes (K,) int64 ids by MurmurHash3's 64-bit finaliser, a bijection, after mixing in `seed` the same way."""
    key = (seed + 1 + 2**63) % 2**64 - 2**63  # wraps; + 1, because the finaliser maps zero to zero
    return _finalise(ids ^ _finalise(torch.tensor(key, device=ids.device)))


def _finalise(x: Tensor) -> Tensor:
    x = (x ^ _shift_33(x)) * _FIRST
    x = (x ^ _shift_33(x)) * _SECOND
    return x ^ _shift_33(x)


def _shift_33(x: Tensor) -> Tensor:
    """Shifts right by 33 bits and fills with zeros; torch's own shift fills with the sign."""
    return (x >> 33) & (2**31 - 1)


def _below(hashed: Tensor, limit: int) -> Tensor:
    return ((hashed >> 1) & (2**63 - 1)) % limit


def server_of(ids: Tensor, servers: int, seed: int) -> Tensor:
    """Maps (K,) ids to (K,) servers, the same on all ranks: Zen's h0."""
    if ids.is_cuda and gpu.available():
        return gpu.server_of(ids.contiguous(), servers, seed)
    return _below(murmur(ids, seed), servers)


@dataclass(frozen=True, eq=False)
class HashPartition:
    """Indices grouped by server.

    Attributes:
        order: (K,) positions of the given indices, server after server.
        counts: (servers,) how many indices each server gets.
        serial: (servers,) how many of these the k hash functions could not place.
    """

    order: Tensor
    counts: Tensor
    serial: Tensor


def hash_partition(ids: Tensor, servers: int, seed: int) -> HashPartition:
    """Groups indices by Zen's hierarchical hashing: h0 chooses the server, h1 .. hk a slot, a serial region the rest.

    Slots are claimed without locks: all indices write, all read back, and an index that reads another one has collided
    and tries the next hash function. The paper's serial region has r2 = r1 / 10 slots, of which 2 slots per index and
    3 functions leave four fifths empty; here it is as long as needed, so that no hash seed can lose an index.

    Args:
        ids: (K,) int64, unique.
        servers: number of servers.
        seed: seed of the hash functions, the same on all ranks.
    """
    count = ids.numel()
    parallel = max(1, -(-SLOTS_PER_INDEX * count // servers))
    if ids.is_cuda and gpu.available():
        slots, left = gpu.claim_slots(ids.contiguous(), servers, parallel, seed, REHASHES)
        server_of_left = server_of(ids[left], servers, seed)
    else:
        server = server_of(ids, servers, seed)
        slots, left = _claim_slots(ids, server, servers, parallel, seed)
        server_of_left = server[left]

    serial = torch.bincount(server_of_left, minlength=servers)
    left = left[torch.argsort(server_of_left, stable=True)]
    region = ids.new_full((servers, max(int(serial.max()), 1)), -1)
    region[torch.arange(region.shape[1], device=ids.device) < serial.unsqueeze(1)] = left
    memory = torch.cat([slots.view(servers, parallel), region], dim=1)
    occupied = memory >= 0
    return HashPartition(memory[occupied], occupied.sum(dim=1), serial)


def _claim_slots(ids: Tensor, server: Tensor, servers: int, parallel: int, seed: int) -> tuple[Tensor, Tensor]:
    """Returns slots (servers * parallel,), each with the position of its index or -1, and the positions left over."""
    slots = ids.new_full((servers * parallel,), -1)
    left = torch.arange(ids.numel(), device=ids.device)
    for attempt in range(1, REHASHES + 1):
        slot = server[left] * parallel + _below(murmur(ids[left], seed + attempt), parallel)
        free = slots[slot] < 0
        slots[slot[free]] = left[free]
        left = left[slots[slot] != left]
    return slots, left


@lru_cache(maxsize=64)
def index_sets(num_ids: int, servers: int, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """Lists for every server the ids from 0 to num_ids - 1 that hash to it, ascending: Zen's I_i.

    The result, 8 bytes per id, is cached, because it costs a sort.
    """
    ids = torch.arange(num_ids, device=device)
    server = server_of(ids, servers, seed)
    counts: list[int] = torch.bincount(server, minlength=servers).tolist()
    sets: tuple[Tensor, ...] = torch.argsort(server, stable=True).split(counts)
    return sets


def hash_bitmap(ids: Tensor, index_set: Tensor) -> Tensor:
    """Makes a bitmap (ceil(I / 8),) uint8: bit p % 8 of byte p // 8 is set if `ids` has the p-th of `index_set`.

    Args:
        ids: (K,) some of the index set, ascending.
        index_set: (I,) ascending.
    """
    if ids.is_cuda and gpu.available():
        return gpu.hash_bitmap(ids.contiguous(), index_set.contiguous())
    bits = ids.new_zeros((-(-index_set.numel() // 8) * 8,), dtype=torch.uint8)
    bits[torch.searchsorted(index_set, ids.contiguous())] = 1
    return (bits.view(-1, 8) << _bit_numbers(ids.device)).sum(dim=1, dtype=torch.uint8)


def ids_of_bitmap(bitmap: Tensor, index_set: Tensor) -> Tensor:
    """Returns the ids of a bitmap, the inverse of `hash_bitmap`; bytes beyond the index set are padding."""
    if bitmap.is_cuda and gpu.available():
        return gpu.ids_of_bitmap(bitmap.contiguous(), index_set.contiguous())
    bits = (bitmap.unsqueeze(1) >> _bit_numbers(bitmap.device)) & 1
    return index_set[bits.view(-1)[: index_set.numel()] != 0]


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
