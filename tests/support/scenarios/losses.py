"""What losses read besides the model's call, and parameters that a batch or a rank does not use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad

from tests.support.scenario import OPTIMIZERS, Training, scenario
from tests.support.sides import DTYPE, Matching

NUM_IDS, DIM = 12, 4
Read = Callable[[Training, int], Tensor]


def beside_the_call(function: Read) -> Callable[[Training], None]:
    """Registers a term that a loop adds to the model's loss. Every second step accumulates two backwards."""

    def run(training: Training) -> None:
        for step in range(4):
            if step % 2:
                with training.model.no_sync():
                    (training.model(*training.batch(10 + step)) + function(training, 10 + step)).backward()
            loss = training.model(*training.batch(step)) + function(training, step)
            loss.backward()
            training.note(loss)
            training.step()

    run.__name__ = function.__name__
    return scenario(optimizer=OPTIMIZERS["sgd"])(run)


@beside_the_call
def a_weight_of_each_rank(training: Training, step: int) -> Tensor:
    """Returns a term with a weight that the forward reads too, scaled differently on each rank."""
    return (training.rank + step) * training.module.first.weight.square().mean()


@beside_the_call
def norms_of_rows(training: Training, step: int) -> Tensor:
    return 0.1 * training.tables[0].norm(dim=1).sum()


@beside_the_call
def rows_that_each_rank_chooses(training: Training, step: int) -> Tensor:
    table, ids = training.tables[0], torch.arange(2 + training.rank) + step
    return 0.1 * (table[ids].square().sum() + (training.rank + 1) * table.square().mean())


@beside_the_call
def a_distance_to_earlier_weights(training: Training, step: int) -> Tensor:
    """As elastic weight consolidation has it."""
    was = [each.detach().clone() * 0.9 for each in training.module.parameters()]
    now = training.module.parameters()
    apart = [(old.square() * (new - old) ** 2).sum() for old, new in zip(was, now, strict=True)]
    return 0.5 * torch.stack(apart).sum()


@scenario(optimizer=OPTIMIZERS["sgd"])
def a_penalty_in_a_backward_of_its_own(training: Training) -> None:
    for batch in training.batches(4):
        training.model(*batch).backward()
        penalty = training.module.first.weight.square().sum() + training.module.second.weight.abs().sum()
        (0.01 * penalty).backward()
        training.step()


class Scaled(Matching):
    """Has a scale that the training loop applies, as for CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.zeros(()))


@scenario(optimizer=None, fresh=True)
def a_scale_that_the_loop_applies(training: Training) -> None:
    module = Scaled()
    model = training.wrap(module)
    optimizer = training.optimize(SGD, module.parameters(), lr=0.3)
    for step in range(3):
        optimizer.zero_grad()
        (model(*training.batch(step)) * module.logit_scale.exp()).backward()
        optimizer.step()


class Branches(nn.Module):
    """A table and a head of each of two branches, and a trunk; a call takes the branches that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Embedding(NUM_IDS, DIM)
        self.a_ids, self.a = nn.Embedding(NUM_IDS, DIM), nn.Linear(DIM, 1)
        self.b_ids, self.b = nn.Embedding(NUM_IDS, DIM), nn.Linear(DIM, 1)
        self.never = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor, taken: str, extra: Tensor | None = None) -> Tensor:
        x = self.trunk(ids)
        found = x.square().mean()
        if "a" in taken:
            found = found + self.a(torch.tanh(x + self.a_ids(ids))).mean()
        if "b" in taken:
            found = found + self.b(torch.tanh(x * self.b_ids(ids))).square().mean()
        if extra is not None:
            found = found + self.b(extra).mean()
        return found


def _ids(training: Training, step: int) -> Tensor:
    return torch.randint(NUM_IDS, (5,), generator=torch.Generator().manual_seed(10 * step + training.rank))


class Branching:
    """Notes gradients, None included, of dense parameters before each step."""

    def __init__(self, training: Training, **options: Any) -> None:
        self.training, self.module = training, Branches()
        self.model = training.wrap(self.module, **options)
        self.optimizer = training.optimize(Adagrad, self.module.parameters(), lr=0.1)

    def call(self, step: int, taken: Sequence[str], extra: Tensor | None = None) -> Any:
        return self.model(_ids(self.training, step), taken[self.training.rank % 2], extra)

    def step(self) -> None:
        named = self.module.named_parameters()
        gradients = [(p.grad, name) for name, p in named if "ids" not in name and "trunk" not in name]
        self.training.note([torch.zeros(()) if grad is None else grad for grad, _ in gradients])
        self.training.note(*(name for grad, name in gradients if grad is None))
        self.optimizer.step()
        self.optimizer.zero_grad()


WITH_UNUSED = {
    "optimizer": None,
    "fresh": True,
    "reference": partial(DistributedDataParallel, find_unused_parameters=True),
}


@scenario(**WITH_UNUSED)
def other_branches_on_each_rank(training: Training) -> None:
    """Both at first; then each rank one, each rank the other, one rank none, all the same."""
    branching = Branching(training)
    for k, taken in enumerate([("ab", "ab"), ("a", "b"), ("b", "a"), ("", "ab"), ("a", "a"), ("", "")]):
        branching.call(k, taken).backward()
        branching.step()


@scenario(**WITH_UNUSED)
def branches_one_by_one(training: Training) -> None:
    """The first step knows of no branch; one comes with the second, the other with the third, on some ranks."""
    branching = Branching(training, strategy={"trunk.weight": "alltoall"})
    for k, taken in enumerate([("", ""), ("a", "a"), ("", "b"), ("ab", "a"), ("b", "")]):
        branching.call(k, taken).backward()
        branching.step()


@scenario(**WITH_UNUSED)
def an_input_on_some_ranks(training: Training) -> None:
    branching = Branching(training, strategy={"trunk.weight": "alltoall"})
    for k in range(3):
        extra = torch.ones((2, DIM), dtype=DTYPE) if training.rank % 2 == k % 2 else None
        branching.call(k, "aa", extra).backward()
        branching.step()


@scenario(**WITH_UNUSED)
def branches_summed_up(training: Training) -> None:
    branching = Branching(training)
    for k, taken in enumerate([("ab", "ab"), ("a", "b"), ("", "a")]):
        with branching.model.no_sync():
            branching.call(10 + k, taken).backward()
            branching.call(20 + k, taken[::-1]).backward()
        branching.call(k, taken).backward()
        branching.step()


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        return None


@scenario(**WITH_UNUSED)
def a_backward_that_reaches_nothing(training: Training) -> None:
    branching = Branching(training)
    for k in range(3):
        loss = branching.call(k, ("ab", "ab"))
        arriving = _NoGradient.apply(loss) if k == 1 else loss  # type: ignore[no-untyped-call]
        arriving.backward()
        branching.step()
