"""What loops do with models that have an output layer over a table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from tests.support.scenario import Training, scenario
from tests.support.scenarios.heads import DIM, NUM_WORDS, Words, draw
from tests.support.scenarios.output_layers import Predicting, WithLoss

Loop = Callable[[Training], None]


def loop(**needs: Any) -> Callable[[Loop], Loop]:
    """Enters a loop with models of its own."""
    return scenario(**{"optimizer": None, "fresh": True} | needs)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@loop(refused="a second time for the results")
def two_backwards_of_one_loss(training: Training) -> None:
    predicting = Predicting(training, Words())
    for step in predicting.steps(3):
        logits, labels = predicting.logits(step)
        loss = _loss(logits, labels)
        loss.backward(retain_graph=True)
        if step:
            (0.5 * loss).backward()


@loop()
def losses_of_two_calls(training: Training) -> None:
    """Learns preferences from chosen and rejected answers, one call for each."""
    predicting = Predicting(training, Words())
    for step in predicting.steps(3):
        (better, labels), (worse, of) = predicting.logits(step), predicting.logits(step + 10)
        loss = F.softplus(_loss(better, labels) - _loss(worse, of)) + 0.1 * better.square().mean()
        training.note(loss)
        loss.backward()


@loop()
def accumulated_reads(training: Training) -> None:
    predicting = Predicting(training, Words(bias=False))
    for step in predicting.steps(3):
        with predicting.model.no_sync():
            for k in (10, 20):
                logits, labels = predicting.logits(step + k)
                (_loss(logits, labels) + 0.1 * logits.square().mean()).backward()
        logits, labels = predicting.logits(step)
        (_loss(logits, labels) + 0.1 * logits.square().mean()).backward()


@loop()
def accumulated_losses(training: Training) -> None:
    predicting = Predicting(training, Words())
    for step in predicting.steps(3):
        with predicting.model.no_sync():
            _loss(*predicting.logits(step + 10)).backward()
        _loss(*predicting.logits(step + 20)).backward()
        _loss(*predicting.logits(step)).backward()


@loop(refused="logits must be read before optimizer.step()")
def logits_of_the_last_step(training: Training) -> None:
    predicting = Predicting(training, Words())
    before = None
    for step in range(3):
        logits, labels = predicting.logits(step)
        loss = _loss(logits, labels)
        if before is not None:
            loss = loss + (before.mean() - logits.mean()).square()
        loss.backward()
        predicting.step()
        before = logits.detach()


@loop()
def logits_of_the_last_step_that_were_copied(training: Training) -> None:
    predicting = Predicting(training, Words())
    before = torch.zeros(())
    for step in predicting.steps(3):
        logits, labels = predicting.logits(step)
        loss = _loss(logits, labels) + (before - logits.mean()).square()
        before = logits.detach().mean()
        training.note(loss)
        loss.backward()


@loop(refused="logits must be read before optimizer.step()")
def data_written_before_the_loss(training: Training) -> None:
    predicting = Predicting(training, Words())
    for step in range(3):
        logits, labels = predicting.logits(step)
        predicting.module.words.weight.data.mul_(0.9)
        _loss(logits, labels).backward()
        predicting.step()


@loop()
def data_written_between_steps(training: Training) -> None:
    predicting = Predicting(training, Words())
    for step in range(3):
        _loss(*predicting.logits(step)).backward()
        predicting.step()
        predicting.module.words.weight.data.clamp_(-0.5, 0.5)
        with torch.no_grad():
            predicting.module.words.weight[2] = 0.25
    predicting.check()


@loop()
def evaluated_with_labels(training: Training) -> None:
    predicting = Predicting(training, WithLoss())
    for step in range(3):
        predicting.loss(step).backward()
        predicting.step()
        predicting.model.eval()
        with torch.no_grad():
            predicting.loss(step + 10)
            logits, labels = predicting.logits(step + 20)
            training.note(logits.argmax(-1), _loss(logits, labels))
        predicting.loss(step + 30)
        predicting.model.train()
        with torch.no_grad():
            predicting.loss(step + 40)
    predicting.check()


@loop()
def calls_with_and_without_labels(training: Training) -> None:
    predicting = Predicting(training, WithLoss())
    for step in predicting.steps(4):
        loss = predicting.loss(step) if step % 2 else _loss(*predicting.logits(step))
        loss.backward()


@loop()
def a_frozen_body_and_a_loss_of_the_loop(training: Training) -> None:
    module = Words(tied=False)
    module.requires_grad_(False)
    module.head.requires_grad_(True)
    predicting = Predicting(training, module, table="head.weight")
    for step in predicting.steps(3):
        loss = _loss(*predicting.logits(step))
        training.note(loss)
        loss.backward()


@loop(reference=partial(DistributedDataParallel, find_unused_parameters=True))
def a_table_frozen_later(training: Training) -> None:
    predicting = Predicting(training, WithLoss())
    for step in range(4):
        predicting.module.words.weight.requires_grad_(step < 2)
        predicting.loss(step).backward()
        predicting.step()


class TwoTables(nn.Module):
    """Two output layers, each of which reads a table of its own words."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = WithLoss(), WithLoss()

    def forward(self, words_BT: Tensor, labels_BT: Tensor) -> Any:
        (a, _), (b, _) = self.a(words_BT, labels_BT), self.b(words_BT.flip(1), labels_BT)
        return a, b


@loop(reference=partial(DistributedDataParallel, find_unused_parameters=True))
def losses_of_two_output_layers(training: Training) -> None:
    module = TwoTables()
    model = training.wrap(module, strategy={"*words.weight": "vocabulary"})
    optimizer = training.optimize(AdamW, module.parameters(), lr=0.02, eps=1e-3)
    for step in range(4):
        a, b = model(*draw(training, step))
        loss = a + 0.3 * b if step != 2 else a
        training.note(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class MayPredict(WithLoss):
    """Rates sentences, and predicts the words of some sentences."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Linear(DIM, 1)

    def forward(self, words_BT: Tensor, labels_BT: Tensor | None = None) -> Any:
        hidden = self.hidden(words_BT)
        rated = self.rates(hidden).square().mean()
        return (rated,) if labels_BT is None else (rated + super().forward(words_BT, labels_BT)[0],)


@loop(reference=partial(DistributedDataParallel, find_unused_parameters=True))
def output_layers_of_some_steps(training: Training) -> None:
    predicting = Predicting(training, MayPredict())
    for step in range(4):
        words, labels = draw(training, step)
        (loss,) = predicting.model(words, labels) if step % 2 else predicting.model(words)
        loss.backward()
        predicting.step()


@loop()
def an_empty_batch(training: Training) -> None:
    predicting = Predicting(training, Words())
    for step in predicting.steps(3):
        words, labels = draw(training, step)
        kept = 0 if step == 1 and training.rank == 1 else 2
        logits = predicting.model(words[:kept])
        loss = F.cross_entropy(logits.reshape(-1, NUM_WORDS), labels[:kept].reshape(-1), reduction="sum") / 5
        training.note(loss)
        loss.backward()


@loop()
def activations_hooked(training: Training) -> None:
    seen: list[Tensor] = []
    module = Words()
    module.head.register_forward_hook(lambda *args: seen.append(args[2].detach().mean()))
    predicting = Predicting(training, module)
    for step in range(3):
        _loss(*predicting.logits(step)).backward()
        predicting.step()
    training.note(*seen)


@loop()
def tied_anew_between_steps(training: Training) -> None:
    """The output layer gets a table of its own, which starts where the words are."""
    module = WithLoss()
    for first in (0, 2):
        predicting = Predicting(training, module)
        for step in range(first, first + 2):
            predicting.loss(step).backward()
            predicting.step()
        whole: Any = predicting.model.whole() if training.is_compiled else contextlib.nullcontext(module)
        with whole as plain:
            state: Mapping[str, Tensor] = {name: each.detach().clone() for name, each in plain.state_dict().items()}
        module = WithLoss(tied=first == 2)
        module.load_state_dict(state)
