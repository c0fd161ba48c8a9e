"""The mean of a dense gradient in fewer bits: each rank adds up its share of it, in float32, and hands the sum out.

A sum within an AllReduce of 16 bits would be rounded at each rank of the ring, of 8 bits it would overflow. Here a
gradient is rounded twice, as it leaves and as the sum does, and both roundings are made good by the next gradient's
(DoubleSqueeze, ICML 2019). All ranks take the sum as it is handed out, so that they have the same bits. It sends what
a ring AllReduce sends of numbers so narrow, 2 (N - 1) / N of it.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

from embrace_fx.cost.wire import BLOCK
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.steps import Steps
from embrace_fx.runtime.kernels.rounding import decode_into, in_blocks
from embrace_fx.runtime.ranks.rounding import Rounding


def sum_rounded_(flat: Tensor, name: str, channel: Channel, rounding: Rounding) -> Steps[Tensor]:
    """The sum over ranks, in place.

    Args:
        name: of the bucket and its chunk: what earlier ones left out is added.
    """
    ranks, form = channel.world_size, rounding.buckets
    block = BLOCK if form == "int8" else 1
    share = ceil(flat.numel() / ranks / block) * block  # of whole blocks, so that they are cut alike everywhere
    padded = flat.new_zeros((ranks * share,), dtype=torch.float32)
    padded[: flat.numel()] = flat
    pieces, every = in_blocks(share), in_blocks(ranks * share)
    came = yield channel.all_to_all_equal(rounding.rounded_bucket(padded, every, name))
    parts = decode_into(padded, came, every, form).view(ranks, share)
    total = parts.sum(0)
    own = rounding.rounded_bucket(total, pieces, f"{name} sum")
    everyone = yield channel.all_gather(own, [own.numel()] * ranks)
    return flat.copy_(decode_into(padded, everyone, every, form)[: flat.numel()])
