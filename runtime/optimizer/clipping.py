"""Gradients that are not where torch looks for them: clipping over dense parameters and sharded tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.row_table import RowTable


def clip_gradients(
    dense: Sequence[nn.Parameter],
    tables: Sequence[RowTable],
    communicator: Communicator,
    max_norm: float,
    norm_type: float,
) -> Tensor:
    """Scales all gradients so that their total norm is at most `max_norm`; returns the norm before.

    The formula of `torch.nn.utils.clip_grad_norm_`; a sharded table's part is summed over the owners of its columns.
    """
    gradients = [parameter.grad for parameter in dense if parameter.grad is not None]
    rows = [pending[1] for table in tables if (pending := table.pending()) is not None]
    local = torch.stack([torch.linalg.vector_norm(g, norm_type) for g in gradients] or [torch.zeros(())])
    own = torch.stack(
        [torch.linalg.vector_norm(r, norm_type) if r.numel() else r.new_zeros(()) for r in rows] or [torch.zeros(())]
    )
    # Half precision would overflow at the square of 256.
    local, own = (norms.to(torch.promote_types(norms.dtype, torch.float32)) for norms in (local, own))
    if norm_type == float("inf"):
        sharded = communicator.reduce_scalar(own.max(), dist.ReduceOp.MAX)
        total = torch.maximum(local.max(), sharded)
    else:
        sharded = communicator.reduce_scalar(own.pow(norm_type).sum(), dist.ReduceOp.SUM)
        total = (local.pow(norm_type).sum() + sharded).pow(1.0 / norm_type)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
    for table in tables:
        table.scale_gradient(factor)
    return total
