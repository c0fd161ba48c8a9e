"""Computes checksums of replicated values, and names the ranks that differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import DivergedReplicas

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> dtype."""


def checksum(tensor: Tensor) -> Tensor:
    """Returns a 64-bit checksum of a tensor's values, as an int64 scalar tensor on its device. The checksum is the sum,
    modulo 2^64, of the tensor's memory read as 8-byte integers. A change of any single bit changes it.

    It depends only on the values and their order, not on strides.
    """
    found = tensor.detach()
    if found.is_complex():
        found = torch.view_as_real(found)
    flat = found.contiguous().view(-1)
    at_once = 8 // flat.element_size()
    if flat.storage_offset() % at_once:
        flat = flat.clone()
    whole = flat.numel() // at_once * at_once
    rest = flat[whole:].view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
    return flat[:whole].view(torch.int64).sum() + rest


def checksum_of_text(text: str) -> int:
    """Hashes a text to a 64-bit number that is equal on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def compare_checksums(values: Iterable[tuple[str, Any]], communicator: Communicator) -> None:
    """Compares the checksums of values that should be equal on all ranks. Collective.

    Args:
        values: pairs of (name, value).

    Raises:
        DivergedReplicas: values differ. Raised on every rank.
    """
    found: dict[str, int] = {}
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for what, value in values:
        if isinstance(value, Tensor):
            by_device.setdefault(value.device, {})[what] = checksum(value)
        else:
            found[what] = checksum_of_text(repr(value))
    for sums in by_device.values():  # one transfer from each device to the host
        found |= zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)
    if difference := describe_divergence(communicator.gather(found, dict[str, int])):
        raise DivergedReplicas(difference)


def describe_divergence(by_rank: Sequence[Mapping[str, int]]) -> str:
    """Returns a sentence that says which values differ on which ranks, or "" if all are equal. Compares each rank's
    value with that of the majority of ranks, or with that of the lowest rank if there is no majority.

    Args:
        by_rank: for each rank, a map from the name of a value to its checksum.

    >>> describe_divergence([{"a": 1, "b": 2}, {"a": 1, "b": 3}])
    "Replicas differ: b on rank 1 differs from rank 0's"
    """
    found = []
    for what in dict.fromkeys(name for checksums in by_rank for name in checksums):
        values = [checksums.get(what) for checksums in by_rank]
        usual = Counter(values).most_common(1)[0][0]
        if others := [rank for rank, value in enumerate(values) if value != usual]:
            ranks = ", ".join(map(str, others))
            found.append(f"{what} on rank {ranks} differs from rank {values.index(usual)}'s")
    if not found:
        return ""
    listed = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    return f"Replicas differ: {listed}"
