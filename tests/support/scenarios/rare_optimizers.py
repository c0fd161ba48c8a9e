"""What optimizers of tables seldom meet: steps of their own, that skip, that raise, or within each other."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import embrace_fx
from tests.support.beside import take_steps
from tests.support.scenario import Training, scenario
from tests.support.training import tables

READ, ROWS, DIM, CLASSES = 20, 40, 6, 3
"""Ids of training are below `READ`; rows from there on are read in evaluation, or never."""


class Odd(nn.Module):
    """A table of one row, one of fewer columns than ranks, a padding row, and bags of every mode."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(1, DIM)
        self.thin = nn.Embedding(ROWS, 1)
        self.padded = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.weighted = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.greatest = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.mean = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=0)
        self.weigh = nn.Linear(1, 1)
        self.linear = nn.Linear(DIM, CLASSES)

    def forward(self, ids_BL: Tensor, features_BL: Tensor, labels_B: Tensor) -> Tensor:
        weights_BL = self.weigh(features_BL.unsqueeze(-1)).squeeze(-1)
        x_BD = self.one(torch.zeros_like(ids_BL[:, 0])) + self.thin(ids_BL).mean(1) + self.padded(ids_BL).mean(1)
        x_BD = x_BD + self.weighted(ids_BL, per_sample_weights=weights_BL) + self.greatest(ids_BL) + self.mean(ids_BL)
        return F.cross_entropy(self.linear(x_BD.tanh()), labels_B)


def odd_batch(step: int, rank: int, first: int = 0, last: int = READ) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    ids_BL = torch.randint(first, last, (4, 3), generator=random)
    labels_B = torch.randint(CLASSES, (4,), generator=random)
    return ids_BL, torch.rand((4, 3), generator=random), labels_B


class Oddly:
    """A training of `Odd`."""

    def __init__(self, training: Training, make: Callable[..., Optimizer]) -> None:
        self.training, self.make = training, make
        self.model = training.wrap(Odd())
        if training.is_compiled:  # max mode compares whole rows, so its table is not sharded
            self.sharded = set(tables(self.model.module)) - {"greatest.weight"}
        self.optimizers: list[Any] = [training.optimize(make, self.model.parameters())]

    def use(self, *optimizers: Optimizer) -> None:
        """Replaces the optimizers."""
        self.optimizers = list(optimizers)
        self.training.optimizers[:] = self.optimizers

    def backward(self, step: int) -> None:
        loss = self.model(*odd_batch(step, self.training.rank))
        self.training.note(loss)
        loss.backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.backward(step)
            self.step()
        if self.training.is_compiled:
            assert set(self.model.plan.sharded) == self.sharded, self.model.plan


Loop = Callable[[Oddly], None]
DECAYING = partial(AdamW, lr=0.02, eps=1e-3, weight_decay=0.1)


def odd(make: Callable[..., Optimizer]) -> Callable[[Loop], Loop]:
    """Enters a loop over `Odd`."""

    def add(function: Loop) -> Loop:
        run: Any = lambda training: function(Oddly(training, make))  # noqa: E731
        run.__name__ = function.__name__
        scenario(optimizer=None, fresh=True)(run)
        return function

    return add


@odd(DECAYING)
def rows_that_only_evaluation_reads(loop: Oddly) -> None:
    for step in range(9):
        loop.train(step)
        if step % 4 == 3:
            loop.model.eval()
            with torch.no_grad():
                loop.training.note(loop.model(*odd_batch(step, loop.training.rank, READ, ROWS)))
            loop.model.train()


@odd(DECAYING)
def steps_of_size_zero(loop: Oddly) -> None:
    for step in range(9):
        for group in loop.optimizers[0].param_groups:
            group["lr"] = 0.0 if step in (0, 3, 4, 8) else 0.02
        loop.train(step)


@odd(DECAYING)
def a_weight_decay_that_changes(loop: Oddly) -> None:
    for step in range(12):
        for group in loop.optimizers[0].param_groups:
            # With 60 and 50, the decay factor is negative or zero, so it has no logarithm.
            group["weight_decay"] = {2: 0.0, 3: 60.0, 6: 50.0, 7: -0.5}.get(step, 0.1 * step)
        loop.train(step)


@odd(partial(AdamW, lr=0.01, eps=1e-3, weight_decay=0.05, amsgrad=True))
def hundreds_of_steps_of_rest(loop: Oddly) -> None:
    loop.train(0)
    for step in range(1, 400):  # batches that read three rows and the padding row
        loop.model(*odd_batch(step % 7, loop.training.rank, 0, 4)).backward()
        loop.step()
    loop.train(1, 2, 3)


def _skips(loop: Oddly, *, unscale: bool = False) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    for step in range(9):
        loss = loop.model(*odd_batch(step, loop.training.rank))
        infinite = step in (0, 3, 4) and loop.training.rank == 1  # makes all ranks skip the step
        scaler.scale(loss * math.inf if infinite else loss).backward()
        if unscale:
            scaler.unscale_(loop.optimizers[0])
        scaler.step(loop.optimizers[0])
        scaler.update()
        loop.model.zero_grad()
        loop.training.note(loss, scaler.get_scale())


@odd(DECAYING)
def a_scaler_that_skips(loop: Oddly) -> None:
    _skips(loop)


@odd(DECAYING)
def a_scaler_that_skips_what_is_unscaled(loop: Oddly) -> None:
    _skips(loop, unscale=True)


@odd(partial(AdamW, lr=0.02, eps=1e-3, weight_decay=0.1, fused=True))
def a_fused_step_that_skips(loop: Oddly) -> None:
    _skips(loop)


@odd(partial(SGD, lr=0.05, momentum=0.9))
def a_scaler_that_skips_momentum(loop: Oddly) -> None:
    _skips(loop)


def _goes_on_alone(loop: Oddly) -> None:
    """Loads a checkpoint of a training with resting rows into a plain model, and trains it in one process."""
    loop.train(*range(7))
    alone, saved = Odd(), copy.deepcopy(embrace_fx.full_state_dict(loop.optimizers[0]))
    alone.load_state_dict(embrace_fx.full_state_dict(loop.model.module))
    optimizer = loop.make(alone.parameters())
    optimizer.load_state_dict(saved)
    take_steps(alone, optimizer, [odd_batch(step, 0, 0, ROWS) for step in range(20, 25)])
    loop.training.models.append(alone)
    loop.training.optimizers.append(optimizer)
    loop.train(7, 8)


@odd(DECAYING)
def gone_on_alone(loop: Oddly) -> None:
    _goes_on_alone(loop)


@odd(partial(RMSprop, lr=0.01, momentum=0.5, centered=True, eps=0.1))
def gone_on_alone_under_RMSprop(loop: Oddly) -> None:
    _goes_on_alone(loop)


@odd(DECAYING)
def a_group_added_on_the_way(loop: Oddly) -> None:
    of_tables = tables(loop.model.module)
    rest = [p for name, p in loop.model.module.named_parameters() if name not in of_tables]
    loop.use(loop.make(rest))
    loop.train(0, 1, 2)
    loop.optimizers[0].add_param_group({"params": list(of_tables.values()), "lr": 0.01, "weight_decay": 0.3})
    loop.train(3, 4, 5)


@odd(DECAYING)
def two_optimizers_of_which_one_is_dropped(loop: Oddly) -> None:
    *some, last = tables(loop.model.module).values()
    rest = [p for p in loop.model.module.parameters() if not any(p is each for each in (*some, last))]
    first = loop.make([*rest, last])
    loop.use(first, SGD(some, lr=0.05, momentum=0.9, weight_decay=0.1))
    loop.train(0, 1, 2)
    loop.use(first)
    loop.train(3, 4)  # no optimizer updates its tables now
    loop.use(first, loop.make(some))
    loop.train(5, 6, 7)


class Editing(AdamW):
    """Changes gradients, and has its base step."""

    element_wise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5).add_(0.01)
        return super().step(closure)


@odd(partial(Editing, lr=0.02, eps=1e-3, weight_decay=0.1))
def a_step_within_a_step(loop: Oddly) -> None:
    AdamW([nn.Parameter(torch.ones(1))])  # torch hooks a class's step when its first instance is created
    loop.train(*range(6))


class Raising(AdamW):
    """Raises an error at the beginning of a step while `raises` is set."""

    element_wise = True
    raises = False

    def step(self, closure: Any = None) -> Any:
        if self.raises:
            raise ArithmeticError("not this one")
        return super().step(closure)


@odd(partial(Raising, lr=0.02, eps=1e-3, weight_decay=0.1))
def a_step_that_raises(loop: Oddly) -> None:
    AdamW([nn.Parameter(torch.ones(1))])
    for step in range(8):
        loop.backward(step)
        optimizer = loop.optimizers[0]
        optimizer.raises = step in (3, 5)
        try:
            optimizer.step()
        except ArithmeticError:
            if step == 5:
                optimizer.raises = False
                optimizer.step()  # retry the step that raised
        loop.model.zero_grad()
