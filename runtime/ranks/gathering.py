"""AllGather of a tensor of every rank: of few bytes as fast as one message."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.ranks.backends import backend_name

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Torch renamed it, and the old name warns."""

AT_ONCE_BYTES = 32 * 1024
"""Up to which gloo gathers by AlltoAll. Its AllGather is a ring, whose N-1 messages wait for each other, and each one
behind what else is on its way; an AlltoAll's go at once. Where bytes are what counts the ring is the better one."""


def gather_single(everyone: Tensor, own: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """`all_gather_single`, with few bytes as fast as one message. Both send N-1 times `own`.

    Args:
        everyone: (N n,), written.
        own: (n,).

    Returns:
        What torch returns: work to be waited for, with `async_op`.
    """
    ranks = everyone.numel() // max(own.numel(), 1)
    if ranks > 2 and own.nbytes <= AT_ONCE_BYTES and group is not None and backend_name(group, own.device) == "gloo":
        return dist.all_to_all_single(everyone, own.repeat(ranks), group=group, async_op=async_op)
    return all_gather_single(everyone, own, group=group, async_op=async_op)
