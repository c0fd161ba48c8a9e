"""Published language models with sharded output layers: losses and parameters are DistributedDataParallel's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import embrace_fx
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.support.published_heads import HEADS, IGNORED, PublishedHead
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import whole_parameters

pytestmark = pytest.mark.timeout(600)

STEPS = 3
TIMEOUT_S = 550.0
OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, 0.1),
    "adagrad": lambda parameters: Adagrad(parameters, 0.05, eps=1e-3),
    "adamw": lambda parameters: AdamW(parameters, 0.01, eps=1e-3),
}


class Run:
    """A model under a wrap, on one rank."""

    def __init__(self, head: PublishedHead, model: Any, module: Any, optimizer: str, rank: int, ranks: int):
        self.head, self.model, self.module, self.rank, self.ranks = head, model, module, rank, ranks
        self.optimizer = OPTIMIZERS[optimizer](module.parameters())
        self.losses: list[Tensor] = []

    def loss(self, step: int) -> Tensor:
        found: Tensor = self.model(**self.head.batch(step, self.rank, self.ranks)).loss
        self.losses.append(found.detach().clone())
        return found

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _plain(run: Run) -> None:
    for step in range(STEPS):
        run.loss(step).backward()
        run.step()


def _outside(run: Run) -> None:
    """The loss is the loop's."""
    for step in range(STEPS):
        batch = run.head.batch(step, run.rank, run.ranks)
        inputs = {"decoder_input_ids": batch["input_ids"].roll(1, 1)} if run.head.scores == "translation" else {}
        logits = run.model(input_ids=batch["input_ids"], **inputs).logits
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].view(-1), reduction="sum") / 5
        loss.backward()
        run.losses.append(loss.detach())
        run.step()


def _accumulates(run: Run) -> None:
    for step in range(STEPS):
        with run.model.no_sync():
            run.loss(step + 10).backward()
        run.loss(step + 20).backward()
        run.loss(step).backward()
        run.step()


def _draws(run: Run) -> None:
    """Dropout draws on each rank as in eager mode."""
    for step in range(STEPS):
        torch.manual_seed(100 * step + run.rank)
        run.loss(step).backward()
        run.step()


def _evaluates(run: Run) -> None:
    """Evaluates, generates where the model can, and trains in turn."""
    words = run.head.batch(7, 0, run.ranks)["input_ids"]
    for step in range(STEPS):
        run.loss(step).backward()
        run.step()
        run.model.eval()
        with torch.no_grad():
            run.losses.append(run.model(**run.head.batch(step + 10, run.rank, run.ranks)).loss)
        whole: Any = run.model.whole() if isinstance(run.model, embrace_fx.CompiledModel) else nullcontext(run.module)
        with whole as module:
            if run.head.scores != "masked":
                ones = torch.ones_like(words)
                found = module.generate(words, attention_mask=ones, max_new_tokens=3, do_sample=False)
                run.losses.append(found.double().sum())
        run.model.train()


LOOPS: Mapping[str, Callable[[Run], None]] = {
    "plain": _plain,
    "outside": _outside,
    "accumulates": _accumulates,
    "draws": _draws,
    "evaluates": _evaluates,
}


def _same(rank: int, ranks: int, name: str, schedule: ScheduleName, loop: str, optimizers: tuple[str, ...]) -> None:
    """Trains under DistributedDataParallel and compiled, once per optimizer, and compares."""
    head, dropout = HEADS[name], 0.3 if loop == "draws" else 0.0
    module = head.make(seed=rank, dropout=dropout)
    compiled = embrace_fx.compile(module, strategy={head.table: "vocabulary"}, schedule=schedule)
    for optimizer in optimizers:
        plain = head.make(dropout=dropout)
        if optimizer != optimizers[0]:
            compiled.load_state_dict(plain.state_dict())
        runs = [
            Run(head, DistributedDataParallel(plain), plain, optimizer, rank, ranks),
            Run(head, compiled, module, optimizer, rank, ranks),
        ]
        for run in runs:
            LOOPS[loop](run)
        assert compiled.plan[head.table].strategy == "vocabulary"
        losses, found = (torch.stack([each.double() for each in run.losses]) for run in runs)
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=1e-9)
        expected = {key: value.detach() for key, value in plain.named_parameters()}
        assert_same(whole_parameters(compiled), expected, torch.float64)


@pytest.mark.long
@pytest.mark.parametrize(("name", "loop"), [("bert", "accumulates"), ("gpt2", "outside"), ("gpt2", "evaluates")])
def test_training_is_as_under_ddp(name: str, loop: str) -> None:
    run_ranks(2, _same, name, "2d", loop, ("adamw",))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["none", "2d"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", HEADS)
def test_every_optimizer_trains_as_under_ddp(name: str, ranks: int, schedule: ScheduleName) -> None:
    run_ranks(ranks, _same, name, schedule, "plain", tuple(OPTIMIZERS), timeout_s=TIMEOUT_S)


@pytest.mark.long
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", HEADS)
def test_every_loop_trains_as_under_ddp(name: str, loop: str) -> None:
    run_ranks(2, _same, name, "2d", loop, ("adamw",), timeout_s=TIMEOUT_S)


def _narrow(rank: int, ranks: int, name: str) -> None:
    head = HEADS[name]
    plain, module = head.make(own_loss=True), head.make(own_loss=True)
    compiled = embrace_fx.compile(module, strategy={head.table: "vocabulary"})
    runs = [
        Run(head, DistributedDataParallel(plain), plain, "sgd", rank, ranks),
        Run(head, compiled, module, "sgd", rank, ranks),
    ]
    for run in runs:
        _plain(run)
    torch.testing.assert_close(torch.stack(runs[1].losses), torch.stack(runs[0].losses), rtol=1e-5, atol=1e-5)
    expected, found = dict(plain.named_parameters()), whole_parameters(compiled)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_losses_in_float32_of_wider_logits_train_as_under_ddp(name: str) -> None:
    """Hugging Face casts the logits of its models of the next word to float32: within 1e-5."""
    run_ranks(2, _narrow, name, timeout_s=TIMEOUT_S)


def _scores_none(rank: int, ranks: int) -> None:
    """In the second step rank 1 scores no position: its mean is nan, its gradients are zeros."""
    head = HEADS["bert"]
    plain = head.make()
    other = DistributedDataParallel(copy.deepcopy(plain))
    compiled = embrace_fx.compile(plain, strategy={head.table: "vocabulary"})
    models: list[Any] = [compiled, other]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            batch = head.batch(step, rank, ranks)
            if step == 1 and rank == 1:
                batch["labels"].fill_(IGNORED)
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = compiled.full_state_dict()
    for name, parameter in other.module.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_a_rank_without_a_scored_position_trains_as_under_ddp() -> None:
    run_ranks(2, _scores_none, timeout_s=TIMEOUT_S)
