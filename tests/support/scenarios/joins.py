"""Loaders of unequal length under `join`; torch's own `Join`, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.optim import SGD

from tests.support.scenario import Training, scenario

NUM_IDS, DIM = 12, 4


class Normed(nn.Module):
    """A table, under buffers that every forward changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(NUM_IDS, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.out = nn.Linear(DIM, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen.add_(ids.double().mean())
        x = self.norm(self.ids(ids))
        return (self.out(x) - self.seen).square().mean()


def ids_of(rank: int, step: int) -> Tensor:
    return torch.randint(NUM_IDS, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


class Joining:
    """A model, and its loop's steps in two epochs, in each of which another rank has more."""

    def __init__(self, training: Training, module: nn.Module | None = None, **options: Any) -> None:
        self.training = training
        self.model = training.wrap(module or Normed(), **options)
        self.optimizer = training.optimize(SGD, lr=0.001, parameters=self.model.parameters())

    def batches(self, epoch: int) -> list[Tensor]:
        more = self.training.rank % 2 == epoch
        return [ids_of(self.training.rank, 10 * epoch + k) for k in range(2 + 3 * more)]

    def train(self, batches: Iterable[Tensor]) -> None:
        for ids in batches:
            self.model(ids).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def join(run: Callable[[Training], None]) -> Callable[[Training], None]:
    return scenario(optimizer=None, fresh=True)(run)


def _unequal(joining: Joining, **options: Any) -> None:
    for epoch in range(2):
        with joining.model.join(**options):
            joining.train(joining.batches(epoch))


@join
def unequal_loaders(training: Training) -> None:
    _unequal(Joining(training))


@join
def unequal_loaders_divided_by_the_active(training: Training) -> None:
    _unequal(Joining(training), divide_by_initial_world_size=False)


@join
def unequal_loaders_of_a_sequence(training: Training) -> None:
    """Whose parameters have names that begin with a digit."""
    _unequal(Joining(training, nn.Sequential(Normed())))


@join
def unequal_loaders_looked_ahead_to(training: Training) -> None:
    """A loader that ends early on a rank: what it would have read next is announced as nothing."""
    joining = Joining(training)
    for epoch in range(2):
        batches = joining.batches(epoch)
        with joining.model.join():
            joining.train(training.lookahead(batches, joining.model))


@join
def unequal_loaders_summed_up(training: Training) -> None:
    joining = Joining(training)
    with Join([joining.model]):
        for k in range(2 + training.rank):
            with joining.model.no_sync():
                joining.model(ids_of(training.rank, 100 + k)).backward()
            joining.train([ids_of(training.rank, k)])


@join
def unequal_loaders_zeroed_first(training: Training) -> None:
    """A rank that has left still holds the gradients of its last step."""
    joining = Joining(training)
    for epoch in range(2):
        with joining.model.join():
            for k in range(2 + training.rank):
                joining.optimizer.zero_grad()
                joining.model(ids_of(training.rank, 10 * epoch + k)).backward()
                joining.optimizer.step()


def third_of_the_sum(_: Any, bucket: Any) -> Any:
    """A user's communication hook, which returns a future of a tensor."""
    work = dist.all_reduce(bucket.buffer().div_(3), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


third_of_the_sum.__annotations__ = {}  # DDP requires its own classes in annotations, or none


@join
def unequal_loaders_under_hooks(training: Training) -> None:
    for hook in (allreduce_hook, third_of_the_sum):
        joining = Joining(training, strategy="allreduce")
        joining.model.register_comm_hook(None, hook)
        _unequal(joining)


def leave_a_sum(rank: int, model: Any, optimizer: Any, epoch: int) -> None:
    """Runs the last backward before a rank leaves under `no_sync`."""
    with model.join():
        for k in range(4 + 2 * rank):
            with model.no_sync() if k % 3 < 2 else contextlib.nullcontext():
                model(ids_of(rank, 10 * epoch + k)).backward()
            if k % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()


@join
def unequal_loaders_left_with_a_sum(training: Training) -> None:
    joining = Joining(training, strategy="allreduce")
    for epoch in range(2):
        leave_a_sum(training.rank, joining.model, joining.optimizer, epoch)
