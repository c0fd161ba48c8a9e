"""Published language models with sharded output layers train as under DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import embrace_fx
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.support.beside import Case, check
from tests.support.published_heads import HEADS, PublishedHead

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 3
OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, 0.1),
    "adagrad": lambda parameters: Adagrad(parameters, 0.05, eps=1e-3),
    "adamw": lambda parameters: AdamW(parameters, 0.01, eps=1e-3),
}


class Run:
    """One rank's wrapped model and its training."""

    def __init__(self, head: PublishedHead, model: Any, rank: int) -> None:
        self.head, self.model, self.rank = head, model, rank

    def batch(self, step: int) -> dict[str, Tensor]:
        return self.head.batch(step, self.rank, dist.get_world_size())

    def loss(self, step: int) -> Tensor:
        found: Tensor = self.model(**self.batch(step)).loss
        return found


def _plain(run: Run, step: int) -> list[Tensor]:
    loss = run.loss(step)
    loss.backward()
    return [loss]


def _outside(run: Run, step: int) -> list[Tensor]:
    """Computes the loss in the training loop."""
    batch = run.batch(step)
    inputs = {"decoder_input_ids": batch["input_ids"].roll(1, 1)} if run.head.scores == "translation" else {}
    logits = run.model(input_ids=batch["input_ids"], **inputs).logits
    loss = F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1), reduction="sum") / 5
    loss.backward()
    return [loss]


def _accumulates(run: Run, step: int) -> list[Tensor]:
    with run.model.no_sync():
        first = _plain(run, step + 10)
    return first + _plain(run, step + 20) + _plain(run, step)


def _draws(run: Run, step: int) -> list[Tensor]:
    """Trains with dropout, whose random numbers on each rank must be those of eager mode."""
    torch.manual_seed(100 * step + run.rank)
    return _plain(run, step)


def _evaluates(run: Run, step: int) -> list[Tensor]:
    """Evaluates, generates if the model supports generation, and trains, in turn."""
    found = []
    if step:
        run.model.eval()
        with torch.no_grad():
            found.append(run.loss(step + 10))
        is_compiled = isinstance(run.model, embrace_fx.CompiledModel)
        with run.model.whole() if is_compiled else nullcontext(run.model.module) as module:
            if run.head.scores != "masked":
                words = run.head.batch(7, 0, dist.get_world_size())["input_ids"]
                ones = torch.ones_like(words)
                found.append(module.generate(words, attention_mask=ones, max_new_tokens=3, do_sample=False).double())
        run.model.train()
    return found + _plain(run, step)


LOOPS: Mapping[str, Callable[[Run, int], list[Tensor]]] = {
    each.__name__.strip("_"): each for each in (_plain, _outside, _accumulates, _draws, _evaluates)
}


def _case(name: str, loop: str, optimizer: str, *, own_loss: bool = False) -> Case:
    head = HEADS[name]

    def train(model: Any, rank: int) -> list[Tensor]:
        run, steps, found = Run(head, model, rank), OPTIMIZERS[optimizer](model.parameters()), list[Tensor]()
        for step in range(STEPS):
            found += [each.detach().clone() for each in LOOPS[loop](run, step)]
            steps.step()
            steps.zero_grad()
        return found

    return partial(head.make, dropout=0.3 if loop == "draws" else 0.0, own_loss=own_loss), train


CASES = {f"{name}, {loop}, {each}": _case(name, loop, each) for name in HEADS for loop in LOOPS for each in OPTIMIZERS}
NARROW = {name: _case(name, "plain", "sgd", own_loss=True) for name in ("gpt2", "gemma2")}


@pytest.mark.parametrize("schedule", ["none", "2d"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", HEADS)
def test_every_optimizer_trains_as_under_ddp(name: str, ranks: int, schedule: ScheduleName) -> None:
    names, strategy = [f"{name}, plain, {each}" for each in OPTIMIZERS], {HEADS[name].table: "vocabulary"}
    check(__name__, *names, ranks=ranks, once=True, rtol=1e-9, strategy=strategy, schedule=schedule)


@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop != "plain"])
@pytest.mark.parametrize("name", HEADS)
def test_every_loop_trains_as_under_ddp(name: str, loop: str) -> None:
    check(__name__, f"{name}, {loop}, adamw", rtol=1e-9, strategy={HEADS[name].table: "vocabulary"})


@pytest.mark.parametrize("name", NARROW)
def test_losses_in_float32_of_wider_logits_train_as_under_ddp(name: str) -> None:
    """Hugging Face casts the logits of its models of the next word to float32: within 1e-5."""
    check(__name__, name, cases="NARROW", rtol=1e-5, strategy={HEADS[name].table: "vocabulary"})
