"""A training script that ends in one of several ways: `python -m tests.support.ends STORE RANK WAY`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Adagrad

import embrace_fx
from tests.support.words import words_batch, words_model

WORLD_SIZE = 2
TIMEOUT_S = 3.0
"""Of the process group."""
LEAVES_AFTER = 4
EXIT_STATUS = 3


def batches(rank: int, way: str) -> Iterator[tuple[Tensor, ...]]:
    for step in range(3 * LEAVES_AFTER):
        if way == "loader raises" and step > LEAVES_AFTER:
            raise ValueError("a user's own error")
        yield words_batch(step, rank)


def main(store: str, rank: int, way: str) -> None:
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    torch.manual_seed(0)
    plain = words_model()
    optimizer = Adagrad(plain.parameters(), lr=0.1)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy="alltoall")
    globals()["loop"] = loop = iter(model.lookahead(batches(rank, way)))  # a global, to exist until the exit
    for step, batch in enumerate(loop):
        if step == LEAVES_AFTER:
            if way == "another rank is stuck" and rank == 1:
                (Path(store).parent / "stuck").touch()
                time.sleep(60.0)
            if way == "half read":
                break
            if way == "exits":
                sys.exit(EXIT_STATUS)
            if way == "raises":
                raise ValueError("a user's own error")
            if way == "one rank raises" and rank == 1:
                raise ValueError("a user's own error")
        loss = model(*batch)
        if way == "between forward and backward" and step == LEAVES_AFTER:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("the end")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
