"""An AlltoAll of single messages: whoever waits hears of its end."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from embrace_fx.runtime.ranks.messages import send_parts
from embrace_fx.runtime.ranks.worker import Worker
from tests.support.golden import check_transcript, run_lines
from tests.support.ranks import run_ranks


def hear_of_a_rank_that_is_gone(rank: int, world_size: int, when_s: float) -> str:
    group = dist.new_group()
    dist.barrier()  # connects both ranks
    if rank == 1:
        time.sleep(when_s)
        dist.destroy_process_group(group)
        return ""
    time.sleep(0.4 - when_s)
    received = [torch.empty(4_000, dtype=torch.int64) for _ in range(world_size)]
    messages = send_parts(group, [torch.arange(4_000)] * world_size, received, Worker("messages"))
    told = threading.Event()
    messages.get_future().add_done_callback(lambda _: told.set())
    with pytest.raises(RuntimeError) as found:
        messages.wait()
    assert told.wait(10.0)
    return str(found.value)


@pytest.mark.parametrize("when_s", [0.0, 0.4])
def test_whoever_waits_hears_of_a_rank_that_is_gone(when_s: float) -> None:
    """The rank exits before the first message, or during the messages."""
    assert run_ranks(2, hear_of_a_rank_that_is_gone, when_s, timeout_s=60)[0]


def sends_parts(rank: int, ranks: int) -> list[list[list[float]]]:
    """Sends 0 to 2 numbers to each rank, as over gloo, as over NCCL, and as over what the group has."""
    found = []
    for backend in ("gloo", "nccl", ""):
        sent = [torch.full(((rank + 2 * to) % 3,), 10.0 * rank + to) for to in range(ranks)]
        received = [torch.zeros((source + 2 * rank) % 3) for source in range(ranks)]
        send_parts(dist.group.WORLD, sent, received, backend=backend).wait()  # type: ignore[arg-type]
        found.append([each.tolist() for each in received])
    return found


def test_every_rank_gets_its_parts() -> None:
    for rank, found in enumerate(run_ranks(4, sends_parts)):
        assert found == [[[10.0 * source + rank] * ((source + 2 * rank) % 3) for source in range(4)]] * 3


def test_what_ranks_tell_each_other() -> None:
    modules = ("failure", "step_handshake", "step_checks", "bad_batches", "checksums", "wire_rounding", "worker")
    check_transcript("ranks", partial(run_lines, "runtime.ranks", modules))
