"""Sends the messages of an exchange over one process group, asynchronously, and counts their bytes.

Contract
    No method waits. Every rank calls the same methods in the same order. Sizes that differ between ranks are known on
    both sides. gloo and NCCL support all collectives used here.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.ranks.communicator import InFlight
from embrace_fx.runtime.ranks.gathering import gather_single
from embrace_fx.runtime.ranks.messages import Messages, send_parts

T = TypeVar("T")

Steps = Generator[InFlight, Tensor, T]
"""A communication in several rounds, with a result.

It yields each collective after launching it, and is resumed with its value; it may launch the next one before it yields
the first. The collectives and their number are the same on all ranks whatever the data, or ranks would wait for
different ones.
"""


def run_exchange(steps: Steps[T]) -> T:
    """Runs an exchange to its end. Waits for each of its rounds, and returns its result.

    Args:
        steps: generator that yields the collective of each round.
    """
    try:
        launch = next(steps)
        while True:
            if launch.work is not None:
                launch.work.wait()
            launch = steps.send(launch.value)
    except StopIteration as end:
        result: T = end.value
        return result


class Channel:
    """Sends this rank's messages and collectives over one process group, asynchronously, and counts their bytes.

    Args:
        group: the process group, of at least two ranks.

    Attributes:
        rank: the index of this rank in the group.
        world_size: the number of ranks in the group.
        sent_bytes: the number of payload bytes that this rank has sent to other ranks so far.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        assert group is not None  # a single process creates no channel
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = 0

    def all_to_all_equal(self, sent: Tensor) -> InFlight:
        """Sends a part of equal size to every rank, and receives a part from every rank, in rank order. Meant for small
        parts.

        Args:
            sent: (N k,), the parts in rank order.
        """
        self.sent_bytes += sent.nbytes // self.world_size * (self.world_size - 1)
        received = torch.empty_like(sent)
        return InFlight(received, dist.all_to_all_single(received, sent, group=self._group, async_op=True))

    def all_to_all(self, sent: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> InFlight:
        """Sends a part to every rank, and receives a part from every rank, in rank order. Uses point-to-point messages.

        Args:
            sent: (sum of send_sizes,), the parts in rank order.
            send_sizes: the number of elements for each rank.
            receive_sizes: the number of elements from each rank.
        """
        received = sent.new_empty((sum(receive_sizes),))
        own, theirs = sent.split(list(send_sizes)), received.split(list(receive_sizes))
        return InFlight(received, self._exchange_messages(own, theirs))

    def all_gather(self, own: Tensor, sizes: Sequence[int]) -> InFlight:
        """Gathers the data of every rank, in rank order. The sizes may differ between ranks.

        If the sizes differ, the data is sent as point-to-point messages, because the collective requires equal sizes.
        Padding would send as many bytes from every rank as from the rank with the most data, and an AlltoAll would
        first write `world_size` copies of `own`.

        Args:
            own: (sizes[rank],), this rank's data.
            sizes: the number of elements of each rank.
        """
        everyone = own.new_empty((sum(sizes),))
        if len(set(sizes)) > 1:
            return InFlight(everyone, self._exchange_messages([own] * self.world_size, everyone.split(list(sizes))))
        self.sent_bytes += (self.world_size - 1) * own.nbytes
        return InFlight(everyone, gather_single(everyone, own, self._group, async_op=True))

    def _exchange_messages(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Messages:
        """Sends a message to every other rank, and receives a message from every other rank. Skips empty messages.

        Args:
            sent, received: the message to each rank, and the memory for the message from each rank.
        """
        self.sent_bytes += sum(part.nbytes for rank, part in enumerate(sent) if rank != self.rank)
        return send_parts(self._group, sent, received)
