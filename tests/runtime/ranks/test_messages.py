"""An AlltoAll of single messages: parts of any size arrive, several are under way at once, and its end is told."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.ranks.messages import Messages, send_parts
from embrace_fx.runtime.ranks.worker import Worker
from tests.support.ranks import run_ranks

ROUNDS = 3


def elements(sender: int, receiver: int, number: int) -> int:
    """Uneven; some parts are empty."""
    return 4_000 * ((sender + 2 * receiver + number) % 3) + number


def part(sender: int, receiver: int, number: int) -> Tensor:
    return torch.arange(elements(sender, receiver, number)) + 1_000_000 * (10 * sender + receiver) + number


def begin(
    rank: int, world_size: int, number: int, waiter: Worker | None, group: dist.ProcessGroup | None = None
) -> tuple[list[Tensor], Messages]:
    group = group or dist.group.WORLD
    assert group is not None
    others = range(world_size)
    received = [torch.empty(elements(other, rank, number), dtype=torch.int64) for other in others]
    return received, send_parts(group, [part(rank, other, number) for other in others], received, waiter)


def exchange_several(rank: int, world_size: int) -> None:
    waiter = Worker("messages")
    for asked in (None, waiter):
        under_way = [begin(rank, world_size, number, asked) for number in range(ROUNDS)]
        for number, (received, messages) in enumerate(under_way):
            if asked is not None:
                messages.get_future().wait()
            messages.wait()
            for other in range(world_size):
                assert torch.equal(received[other], part(other, rank, number))


def hear_of_a_rank_that_is_gone(rank: int, world_size: int, when_s: float) -> str:
    group = dist.new_group()
    if rank == 1:
        time.sleep(when_s)
        dist.destroy_process_group(group)
        return ""
    time.sleep(1.0 - when_s)
    _received, messages = begin(rank, world_size, 1, Worker("messages"), group)
    told = threading.Event()
    messages.get_future().add_done_callback(lambda _: told.set())
    with pytest.raises(RuntimeError) as found:
        messages.wait()
    assert told.wait(10.0)
    return str(found.value)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parts_of_any_size_arrive(world_size: int) -> None:
    run_ranks(world_size, exchange_several)


@pytest.mark.parametrize("when_s", [0.0, 1.0])
def test_whoever_waits_hears_of_a_rank_that_is_gone(when_s: float) -> None:
    """Before the first message, or while they are under way."""
    assert run_ranks(2, hear_of_a_rank_that_is_gone, when_s, timeout_s=60)[0]
