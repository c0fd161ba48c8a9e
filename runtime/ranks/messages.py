"""Sends an AlltoAll as separate point-to-point messages.

gloo's own AlltoAll starts with sends. A sender waits until its receiver is ready, and that notice queues behind the
data that the receiver is sending. Here each rank posts all receives first, so that both directions of a link are used:
1.9 times as fast on 2 ranks, 1.5 on 4, 1.3 on 8 (`benchmarks/micro/small_messages.py`). Empty messages are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from embrace_fx.runtime.ranks.backends import backend_name
from embrace_fx.runtime.ranks.worker import Worker


class Messages:
    """Several point-to-point messages in flight. It has the methods of torch's `Work`, the handle of a collective.

    Args:
        works: torch's handles of the messages.
        waiter: a thread that waits for the messages if `get_future` is called, because gloo provides no future.
    """

    def __init__(self, works: Sequence[dist.Work], waiter: Worker | None = None) -> None:
        self._works, self._waiter = works, waiter
        self._end: Future[None] | None = None

    def wait(self) -> None:
        """Waits until all messages have been received and sent.

        Raises:
            RuntimeError: a rank is gone.
        """
        if self._end is not None:
            self._end.wait()
        else:
            wait_all(self._works)

    def get_future(self) -> Future[None]:
        """Returns a future that completes once all messages have been received and sent. May be called only once."""
        assert self._waiter is not None
        self._end = self._waiter.submit(partial(wait_all, self._works))
        return self._end


def wait_all(works: Sequence[dist.Work]) -> None:
    """Waits for all messages or collectives, given by torch's handles."""
    for work in works:
        work.wait()


def send_parts(
    group: dist.ProcessGroup,
    sent: Sequence[Tensor],
    received: Sequence[Tensor],
    waiter: Worker | None = None,
    backend: str = "",
) -> Messages:
    """Starts an AlltoAll as separate messages. This rank sends one tensor to every other rank of a process group, and
    receives one tensor from every other rank. Copies the tensor for this rank itself. Supports gloo and NCCL.

    Args:
        sent: the tensor for each rank.
        received: for each rank, the memory for the tensor that it sends.
        waiter: a thread that waits for the messages if a future for them is requested, or None.
        backend: the name of the group's backend for these tensors, or "" to look it up.

    Returns:
        A handle to wait for all messages.
    """
    own, ranks = group.rank(), group.size()
    if received[own].numel():
        received[own].copy_(sent[own])
    # Each rank starts with its right neighbour, so that not all ranks send to the same rank first.
    turns = range(1, ranks)
    works: list[Any] = []
    if (backend or backend_name(group, received[own].device)) == "gloo":
        try:
            for turn in turns:
                source = (own - turn) % ranks
                if received[source].numel():
                    works.append(group.recv([received[source]], source, 0))
            for turn in turns:
                target = (own + turn) % ranks
                if sent[target].numel():
                    works.append(group.send([sent[target]], target, 0))
        except RuntimeError as error:  # the caller's wait raises it and names the rank
            failed: Future[Any] = Future()
            failed.set_exception(error)
            works.append(failed)
    else:  # NCCL needs sends and receives in one group
        to = [rank for turn in turns if sent[rank := (own + turn) % ranks].numel()]
        sources = [rank for turn in turns if received[rank := (own - turn) % ranks].numel()]
        messages = [dist.P2POp(dist.irecv, received[rank], group=group, group_peer=rank) for rank in sources]
        messages += [dist.P2POp(dist.isend, sent[rank], group=group, group_peer=rank) for rank in to]
        works = dist.batch_isend_irecv(messages) if messages else []
    return Messages(works, waiter)


def send_one(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    """Sends a contiguous tensor to the rank `to`, which calls `receive_one`. Waits until the tensor is sent."""
    _transfer(dist.isend, tensor, to, group)


def receive_one(tensor: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Receives the tensor that the rank `source` sends with `send_one`, into a tensor of the same size."""
    _transfer(dist.irecv, tensor, source, group)


def _transfer(operation: Callable[..., Any], tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Sends or receives one tensor, and waits for it.

    Args:
        operation: `dist.isend` or `dist.irecv`.
        peer: the other rank.
    """
    # Send a batch of one message, because NCCL would create a communicator of two ranks for a single one.
    wait_all(dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=group, group_peer=peer)]))
