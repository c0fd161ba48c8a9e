"""Training that survives the death of ranks: run it under torchrun --max-restarts, on any number of ranks.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 3 examples/resume.py checkpoints

The variable gives every attempt a store of its own: gloo would find the addresses of dead processes in a shared one.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

import embrace_fx

ROWS, WIDTH, BATCH, LENGTH = 1000, 16, 12, 5
SAVED_EVERY, KEPT = 5, 2
"""Steps between two checkpoints; how many are kept."""


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Flatten(), nn.Linear(LENGTH * WIDTH, 1)).double()


def batch_of(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's part of a step's batch. The whole batch is the same for any number of ranks, so the number may
    change.
    """
    random = torch.Generator().manual_seed(step)
    words = torch.randint(ROWS, (BATCH, LENGTH), generator=random)
    wanted = torch.randn(BATCH, 1, generator=random, dtype=torch.float64)
    return words[rank::ranks], wanted[rank::ranks]


def latest(directory: Path) -> Path | None:
    """Returns the last complete checkpoint: its file `.metadata` is written last."""
    return max((path.parent for path in directory.glob("step-*/.metadata")), default=None)


def train(directory: Path, steps: int, before_step: Callable[[int], None] = lambda step: None) -> None:
    dist.init_process_group("gloo")
    rank, ranks, saves = dist.get_rank(), dist.get_world_size(), dist.new_group()
    plain = make_model()
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.1)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy="alltoall")
    first, found = 0, latest(directory)
    saving: Any = None
    if found is not None:
        weights, state = get_state_dict(plain, optimizer)
        stored: dict[str, Any] = {"model": weights, "optimizer": state}
        load(stored, checkpoint_id=found)
        set_state_dict(plain, optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"])
        first = int(found.name.removeprefix("step-"))
        print(f"rank {rank} of {ranks} goes on from step {first}", flush=True)
    for step in range(first, steps):
        before_step(step)
        words, wanted = batch_of(step, rank, ranks)
        nn.functional.mse_loss(model(words), wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVED_EVERY == 0:
            if saving is not None:
                saving.result()
            weights, state = get_state_dict(plain, optimizer)
            path = directory / f"step-{step + 1:06d}"
            stored = {"model": weights, "optimizer": state}
            # Copies the state, and writes it in another thread while training continues, so it needs its own group.
            saving = async_save(stored, checkpoint_id=path, process_group=saves)
            del weights, state, stored  # while references to optimizer state exist, updates are not deferred
            if rank == 0:
                for old in sorted(path.parent for path in directory.glob("step-*/.metadata"))[:-KEPT]:
                    shutil.rmtree(old)
    if saving is not None:
        saving.result()
    whole = model.full_state_dict()
    if rank == 0:
        torch.save(whole, directory / "weights.pt")
    model.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    train(arguments.directory, arguments.steps)
