"""An AllGather that takes only the time of one message for small tensors."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from embrace_fx.runtime.ranks.backends import backend_name

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Renamed in newer versions of torch, where the old name warns."""

AT_ONCE_BYTES = 32 * 1024
"""The largest tensor that gloo gathers by an AlltoAll, which sends all messages at once. gloo's AllGather is a ring of
N-1 sequential messages, which is faster only if bandwidth dominates latency."""


def gather_single(everyone: Tensor, own: Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False) -> Any:
    """Gathers the elements of every rank, like `dist.all_gather_single`, but faster for small tensors.

    Args:
        everyone: (N n,), overwritten by the elements of all N ranks, in rank order.
        own: (n,), the elements of this rank.
        async_op: whether to return without waiting.

    Returns:
        The handle to wait for if `async_op` is True, otherwise None.
    """
    ranks = everyone.numel() // max(own.numel(), 1)
    if ranks > 2 and own.nbytes <= AT_ONCE_BYTES and group is not None and backend_name(group, own.device) == "gloo":
        return dist.all_to_all_single(everyone, own.repeat(ranks), group=group, async_op=async_op)
    # Call the group directly: torch's function would add five Python calls to every step.
    if async_op and group is not None and not own.is_cuda:
        gather = getattr(group, "all_gather_single", None) or group._allgather_base
        return gather(everyone, own, AllgatherOptions())
    return all_gather_single(everyone, own, group=group, async_op=async_op)
