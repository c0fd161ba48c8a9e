"""What the lab's tests share: turns that were made up, and losses of one process that trains on all ranks' batches."""

from __future__ import annotations

from benchmarks.models.base import Workload
from benchmarks.peers import SYSTEMS
from benchmarks.peers.base import Task

LEARNING_RATES = {"sgd": 0.2, "adagrad": 0.05}
STEPS = 5


def reference_losses(workload: Workload, optimizer: str, ranks: int) -> list[float]:
    """One process, dense gradients, torch's own optimizer; mean over ranks, by step."""
    what = Task(workload, optimizer, LEARNING_RATES[optimizer])
    trained = what.model()
    optimizer_hooks = what.make_optimizer(trained.parameters())
    losses = []
    for step in range(STEPS):
        optimizer_hooks.zero_grad()
        found = []
        for rank in range(ranks):  # one backward per rank: emulated blocks cannot compute a joint batch
            loss = trained(*what.workload.batch(step, rank, 0))
            (loss / ranks).backward()
            found.append(loss.item())
        optimizer_hooks.step()
        losses.append(sum(found) / ranks)
    return losses


def train(rank: int, world_size: int, system: str, workload: Workload, optimizer: str) -> list[float]:
    """A rank's losses under a system."""
    what = Task(workload, optimizer, LEARNING_RATES[optimizer])
    training = SYSTEMS[system].peer().prepare(what)
    return [loss.item() for loss in training.steps(workload.batch(step, rank, 0) for step in range(STEPS))]


def means(by_rank: list[list[float]]) -> list[float]:
    """Returns the mean over ranks for each step."""
    return [sum(losses) / len(losses) for losses in zip(*by_rank, strict=True)]
