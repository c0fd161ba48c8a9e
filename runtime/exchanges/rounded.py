"""Sums a dense gradient that is sent rounded: each rank sums its share of the elements in float32, and sends the
sum.

An AllReduce of 16 bits would round at each rank of the ring, and one of 8 bits would overflow. Here a gradient is
rounded twice, when it is sent and when the sum is sent, and the next gradient corrects both errors (DoubleSqueeze, ICML
2019). All ranks use the rounded sum, so that they have the same bits. Sends as many bytes as a ring AllReduce of the
narrow numbers, 2 (N - 1) / N of the tensor.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from embrace_fx.cost.wire import BLOCK
from embrace_fx.runtime.exchanges.channel import Channel, Steps
from embrace_fx.runtime.kernels.rounding import as_blocks, decode_into
from embrace_fx.runtime.ranks.wire_rounding import Rounding


def sum_rounded_(flat: Tensor, name: str, channel: Channel, rounding: Rounding) -> Steps[Tensor]:
    """Sums a gradient over ranks, in place, and rounds the messages that ranks send. Returns the gradient.

    Args:
        flat: the gradient.
        name: the name of the bucket or chunk. `rounding` stores its rounding errors under this name.
        channel: sends the messages.
        rounding: rounds the gradient and stores the errors.
    """
    ranks, form = channel.world_size, rounding.form
    block = BLOCK if form == "int8" else 1
    share = ceil(flat.numel() / ranks / block) * block  # whole blocks, so that all ranks use the same blocks
    padded = flat.new_zeros((ranks * share,), dtype=torch.float32)
    padded[: flat.numel()] = flat
    pieces, every = as_blocks(share), as_blocks(ranks * share)
    came = yield channel.all_to_all_equal(rounding.rounded_bucket(padded, every, name))
    parts = decode_into(padded, came, every, form).view(ranks, share)
    total = parts.sum(0)
    own = rounding.rounded_bucket(total, pieces, f"{name} sum")
    everyone = yield channel.all_gather(own, [own.numel()] * ranks)
    return flat.copy_(decode_into(padded, everyone, every, form)[: flat.numel()])
