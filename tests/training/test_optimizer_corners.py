"""Loops and tables that optimizers of tables in shards seldom meet, trained as under DistributedDataParallel.

The model has a table of one row, one of fewer columns than ranks, a padding row, and bags of every mode.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import embrace_fx
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from tests.support.ranks import run_ranks
from tests.support.training import tables, whole, whole_state

DTYPE = torch.float64
READ, ROWS, DIM, CLASSES = 20, 40, 6, 3
"""Ids of training are below `READ`; rows from there on are read in evaluation, or never."""

Batch = tuple[Tensor, Tensor, Tensor]
Ends = dict[str, Tensor]


class Odd(nn.Module):
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


def odd_model() -> Odd:
    torch.manual_seed(0)
    return Odd().to(DTYPE)


def odd_batch(step: int, rank: int, first: int = 0, last: int = READ) -> Batch:
    random = torch.Generator().manual_seed(100 * step + rank)
    ids_BL = torch.randint(first, last, (4, 3), generator=random)
    labels_B = torch.randint(CLASSES, (4,), generator=random)
    return ids_BL, torch.rand((4, 3), generator=random, dtype=DTYPE), labels_B


class Trainer:
    """A wrapped model, and what its loop has seen."""

    def __init__(self, rank: int, model: Any, make: Callable[..., Optimizer]) -> None:
        self.rank, self.model = rank, model
        self.make = make
        self.optimizers = [make(model.parameters())]
        self.log: list[float] = []
        self.ends: Ends = {}

    @property
    def plain(self) -> nn.Module:
        found: nn.Module = self.model.module
        return found

    def backward(self, step: int, factor: float = 1.0) -> None:
        loss = self.model(*odd_batch(step, self.rank))
        self.log.append(loss.item())
        (loss * factor).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()

    def train(self, *steps: int) -> None:
        for step in steps:
            self.backward(step)
            self.step()

    def finish(self) -> None:
        state = whole(self.model.state_dict().items())
        self.ends |= {name.removeprefix("module."): value for name, value in state.items()}
        for optimizer in self.optimizers:
            self.ends |= whole_state(self.plain, optimizer)


class Raising(AdamW):
    """Raises in the steps that it is told to, before anything is stepped."""

    element_wise = True
    raises = False

    def step(self, closure: Any = None) -> Any:
        if self.raises:
            raise ArithmeticError("not this one")
        return super().step(closure)


class Editing(AdamW):
    """Changes gradients, and has its base step."""

    element_wise = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5).add_(0.01)
        return super().step(closure)


Loop = Callable[[Trainer], None]
LOOPS: dict[str, tuple[Callable[..., Optimizer], Loop]] = {}
ADAMW = partial(AdamW, lr=0.02, eps=1e-3, weight_decay=0.1)


def loop(make: Callable[..., Optimizer]) -> Callable[[Loop], Loop]:
    def add(function: Loop) -> Loop:
        LOOPS[function.__name__.replace("_", " ")] = make, function
        return function

    return add


@loop(ADAMW)
def rows_that_only_evaluation_reads(trainer: Trainer) -> None:
    for step in range(9):
        trainer.train(step)
        if step % 4 == 3:
            trainer.model.eval()
            with torch.no_grad():
                trainer.log.append(float(trainer.model(*odd_batch(step, trainer.rank, READ, ROWS))))
            trainer.model.train()


@loop(ADAMW)
def steps_of_size_zero(trainer: Trainer) -> None:
    for step in range(9):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.0 if step in (0, 3, 4, 8) else 0.02
        trainer.train(step)


@loop(ADAMW)
def a_weight_decay_that_changes(trainer: Trainer) -> None:
    for step in range(12):
        for group in trainer.optimizers[0].param_groups:
            # 60 and 50: weights change their sign, or become zero, and no logarithm tells of it.
            group["weight_decay"] = {2: 0.0, 3: 60.0, 6: 50.0, 7: -0.5}.get(step, 0.1 * step)
        trainer.train(step)


@loop(partial(AdamW, lr=0.01, eps=1e-3, weight_decay=0.05, amsgrad=True))
def hundreds_of_steps_of_rest(trainer: Trainer) -> None:
    trainer.train(0)
    for step in range(1, 400):  # of three rows, and the padding
        loss = trainer.model(*odd_batch(step % 7, trainer.rank, 0, 4))
        loss.backward()
        trainer.step()
    trainer.train(1, 2, 3)


def _scaled(trainer: Trainer, *, unscale: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    for step in range(9):
        loss = trainer.model(*odd_batch(step, trainer.rank))
        infinite = step in (0, 3, 4) and trainer.rank == 1  # all ranks have to skip
        scaler.scale(loss * math.inf if infinite else loss).backward()
        if unscale:
            scaler.unscale_(trainer.optimizers[0])
        scaler.step(trainer.optimizers[0])
        scaler.update()
        trainer.model.zero_grad()
        trainer.log += [loss.item(), scaler.get_scale()]


@loop(ADAMW)
def a_scaler_that_skips(trainer: Trainer) -> None:
    _scaled(trainer, unscale=False)


@loop(ADAMW)
def a_scaler_that_skips_what_is_unscaled(trainer: Trainer) -> None:
    _scaled(trainer, unscale=True)


@loop(partial(AdamW, lr=0.02, eps=1e-3, weight_decay=0.1, fused=True))
def a_fused_step_that_skips(trainer: Trainer) -> None:
    _scaled(trainer, unscale=False)


@loop(partial(SGD, lr=0.05, momentum=0.9))
def a_scaler_that_skips_momentum(trainer: Trainer) -> None:
    _scaled(trainer, unscale=False)


def _gone_on_alone(trainer: Trainer) -> None:
    """Saved while rows rest, loaded into a plain model and its own optimizer, and trained on by one process."""
    trainer.train(*range(7))
    compiled = isinstance(trainer.model, embrace_fx.CompiledModel)
    full: Any = embrace_fx.full_state_dict if compiled else type(trainer.optimizers[0]).state_dict
    alone, saved = odd_model(), full(trainer.optimizers[0])
    alone.load_state_dict(whole(trainer.plain.state_dict().items()))
    optimizer = trainer.make(alone.parameters())
    optimizer.load_state_dict(copy.deepcopy(saved))  # otherwise it would be shared
    for step in range(20, 25):
        alone(*odd_batch(step, 0, 0, ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trainer.ends |= {f"alone: {name}": value.detach() for name, value in alone.named_parameters()}
    trainer.ends |= {f"alone: {name}": value for name, value in whole_state(alone, optimizer).items()}
    trainer.train(7, 8)


@loop(ADAMW)
def gone_on_alone(trainer: Trainer) -> None:
    _gone_on_alone(trainer)


@loop(partial(RMSprop, lr=0.01, momentum=0.5, centered=True, eps=0.1))
def gone_on_alone_under_RMSprop(trainer: Trainer) -> None:
    _gone_on_alone(trainer)


@loop(ADAMW)
def a_group_added_on_the_way(trainer: Trainer) -> None:
    of_tables = tables(trainer.plain)
    rest = [p for name, p in trainer.plain.named_parameters() if name not in of_tables]
    trainer.optimizers = [trainer.make(rest)]
    trainer.train(0, 1, 2)
    trainer.optimizers[0].add_param_group({"params": list(of_tables.values()), "lr": 0.01, "weight_decay": 0.3})
    trainer.train(3, 4, 5)


@loop(ADAMW)
def two_optimizers_of_which_one_is_dropped(trainer: Trainer) -> None:
    *some, last = tables(trainer.plain).values()
    rest = [p for p in trainer.plain.parameters() if not any(p is each for each in (*some, last))]
    trainer.optimizers = [trainer.make([*rest, last]), SGD(some, lr=0.05, momentum=0.9, weight_decay=0.1)]
    trainer.train(0, 1, 2)
    del trainer.optimizers[1]
    trainer.train(3, 4)  # its tables stand still
    trainer.optimizers.append(trainer.make(some))
    trainer.train(5, 6, 7)


@loop(partial(Editing, lr=0.02, eps=1e-3, weight_decay=0.1))
def a_step_within_a_step(trainer: Trainer) -> None:
    AdamW([nn.Parameter(torch.ones(1))])  # from the first one on, torch hooks the step of the class
    trainer.train(*range(6))


@loop(partial(Raising, lr=0.02, eps=1e-3, weight_decay=0.1))
def a_step_that_raises(trainer: Trainer) -> None:
    AdamW([nn.Parameter(torch.ones(1))])
    for step in range(8):
        trainer.backward(step)
        optimizer: Any = trainer.optimizers[0]
        optimizer.raises = step in (3, 5)
        try:
            optimizer.step()
        except ArithmeticError:
            if step == 5:
                optimizer.raises = False
                optimizer.step()  # once more
        trainer.model.zero_grad()


WAYS: tuple[RowUpdatesOption, ...] = ("sweep", "replay")


def _compare(rank: int, world_size: int, name: str) -> list[tuple[str, list[float], Ends]]:
    make, train = LOOPS[name]
    found = []
    for way in (None, *WAYS):
        plain = odd_model()
        model: Any = (
            DistributedDataParallel(plain)
            if way is None
            else embrace_fx.compile(plain, strategy="alltoall", row_updates=way)
        )
        trainer = Trainer(rank, model, make)
        train(trainer)
        trainer.finish()
        if way is not None:  # a maximum compares whole rows
            assert set(model.plan.sharded) == set(tables(plain)) - {"greatest.weight"}, model.plan
        found.append((str(way), trainer.log, trainer.ends))
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_what_is_seldom_met_is_trained_as_under_ddp(name: str) -> None:
    for by_way in run_ranks(2, _compare, name):
        (_, expected_log, expected), *others = by_way  # DDP's first
        for way, log, ends in others:
            assert log == pytest.approx(expected_log, rel=1e-9, nan_ok=True), way
            assert ends.keys() == expected.keys(), way
            for key, value in expected.items():
                torch.testing.assert_close(ends[key], value, rtol=1e-9, atol=1e-11, msg=f"{way}: {key}")
