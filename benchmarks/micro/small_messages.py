"""What few bytes of every rank take beside many, by gloo's AllGather and AlltoAll; and many, by gloo's and ours.

    python -m benchmarks.micro.small_messages --ranks 8 --rate-mbit 564 --slow 8

Each rank on a host of its own (benchmarks/network.py). Milliseconds as measured, not as perceived: of rank 0, medians.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.network import Links, network
from embrace_fx.runtime.ranks.messages import send_parts

SMALL_BYTES = (64, 16 * 1024, 64 * 1024)
LARGE_BYTES = 500_000
"""Of an AlltoAll, for each other rank."""
ROUNDS, AFTER_S = 5, 0.1
"""How often each is measured, and how long the large exchange has been under way when a small one begins."""


def timed_ms(exchange: Callable[[], object]) -> float:
    began = time.perf_counter()
    exchange()
    return (time.perf_counter() - began) * 1e3


def by_messages(received: Tensor, sent: Tensor) -> None:
    """Runs the AlltoAll as the runtime does."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    send_parts(group, sent.chunk(ranks), received.chunk(ranks)).wait()


def run_rank() -> None:
    dist.init_process_group("gloo")
    ranks, small = dist.get_world_size(), dist.new_group()
    sent = torch.zeros(ranks * LARGE_BYTES // 4)
    received = torch.empty_like(sent)

    def say(what: str, ms: list[float]) -> None:
        if dist.get_rank() == 0:
            print(f"{what}: {median(ms):.0f} ms ({min(ms):.0f} to {max(ms):.0f})")

    for nbytes in SMALL_BYTES:
        own = torch.zeros(nbytes // 4)
        everyone = own.new_empty(ranks * own.numel())
        gather: Callable[[], object] = partial(dist.all_gather, list(everyone.chunk(ranks)), own, group=small)
        at_once: Callable[[], object] = partial(dist.all_to_all_single, everyone, own.repeat(ranks), group=small)
        for name, exchange in (("AllGather", gather), ("AlltoAll", at_once)):
            exchange()
            alone, beside = [], []
            for _ in range(ROUNDS):
                dist.barrier()
                alone.append(timed_ms(exchange))
                dist.barrier()
                work = dist.all_to_all_single(received, sent, async_op=True)
                time.sleep(AFTER_S)
                beside.append(timed_ms(exchange))
                assert work is not None
                work.wait()
            say(f"{nbytes} bytes of each rank by {name}, alone", alone)
            say(f"{nbytes} bytes of each rank by {name}, beside the large one", beside)
    all_at_once: Callable[[], object] = partial(dist.all_to_all_single, received, sent)
    messages: Callable[[], object] = partial(by_messages, received, sent)
    for name, exchange in (("gloo's AlltoAll", all_at_once), ("messages, receives first", messages)):
        exchange()
        ms = []
        for _ in range(ROUNDS):
            dist.barrier()
            ms.append(timed_ms(exchange))
        say(f"{LARGE_BYTES * (ranks - 1)} bytes of each rank, {name}", ms)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rate-mbit", type=float, default=564.0)
    parser.add_argument("--slow", type=float, default=8.0)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank()
        return
    with network(Links(options.ranks, options.rate_mbit, options.slow)) as hosts:
        reached = median(hosts.reached.transfer_mbit)
        print(f"{options.ranks} ranks; a bare transfer reaches {reached:.1f} Mb/s")
        command = [sys.executable, "-m", "benchmarks.micro.small_messages", "--rank"]
        print(hosts.run(command, timeout_s=600)[0], end="")


if __name__ == "__main__":
    main()
