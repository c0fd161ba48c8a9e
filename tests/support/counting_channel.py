"""A channel that counts start-ups, and has the AllReduce that exchanges are measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.ranks.communicator import InFlight
from embrace_fx.runtime.ranks.messages import Messages


class CountingChannel(Channel):
    """A channel of which also start-ups are known.

    Attributes:
        messages: start-ups, one after the other, of what has been sent: for an AlltoAll or AllGather one for each peer
            that gets data, for an AllReduce 2 (N-1).
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self.messages = 0

    def all_reduce_(self, flat: Tensor) -> None:
        """Sums a tensor over ranks, in place: a ring sends 2 (N-1)/N of it."""
        steps = 2 * (self.world_size - 1)
        self.sent_bytes += round(steps * flat.nbytes / self.world_size)
        self.messages += steps
        dist.all_reduce(flat, group=self._group)

    def all_to_all_equal(self, sent: Tensor) -> InFlight:
        self.messages += (self.world_size - 1) * (sent.numel() > 0)
        return super().all_to_all_equal(sent)

    def all_gather(self, own: Tensor, sizes: Sequence[int]) -> InFlight:
        self.messages += (self.world_size - 1) * (own.numel() > 0) if len(set(sizes)) == 1 else 0
        return super().all_gather(own, sizes)

    def _exchange_messages(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Messages:
        self.messages += sum(part.numel() > 0 for rank, part in enumerate(sent) if rank != self.rank)
        return super()._exchange_messages(sent, received)
