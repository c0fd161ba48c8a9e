"""One training of a task by one method, for a number of epochs.

All methods are judged alike, after every `EVERY` epochs, and keep the weights with the lowest training loss. An epoch
is a pass over the training data in random batches of `BATCH`, an optimizer's as well as ADMM's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.admm.tasks import Pair, Task
from embrace_fx import admm
from embrace_fx.admm.model import read_data, read_weights, write_weights
from embrace_fx.admm.setup import rescale_weights

BATCH = 16
EVERY = 2
"""Epochs between two judgements."""

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[Make, tuple[float, ...]]] = {
    "SGD": (torch.optim.SGD, (1.0, 0.1, 0.01)),
    "momentum": (partial(torch.optim.SGD, momentum=0.9), (0.1, 0.01, 0.001)),
    "Adagrad": (torch.optim.Adagrad, (0.1, 0.01, 0.001)),
    "Adam": (torch.optim.Adam, (0.01, 0.001, 0.0001)),
}
"""How to make each, and the learning rates that it is tuned over."""

METHODS = ("ADMM", *OPTIMIZERS)


@dataclass(frozen=True)
class Outcome:
    """The result of one training.

    Attributes:
        accuracy: on the test data, of the weights with the lowest training loss.
        curve: test accuracy after every `EVERY` epochs, of the weights kept by then.
        losses: training loss after every `EVERY` epochs, of the current weights.
    """

    accuracy: float
    curve: list[float]
    losses: list[float]


class Judge:
    """Evaluates a model during training, and stores its accuracy at the lowest training loss."""

    def __init__(self, rnn: nn.RNN, head: nn.Linear, task: Task) -> None:
        self._rnn, self._head, self._task = rnn, head, task
        self._lowest, self.accuracy = float("inf"), 0.0
        self.curve: list[float] = []
        self.losses: list[float] = []

    def look(self) -> None:
        with torch.no_grad():
            loss = float(scores_and_loss(self._rnn, self._head, self._task.train)[1])
            scores, _ = scores_and_loss(self._rnn, self._head, self._task.test)
            accuracy = float((scores.argmax(-1) == self._task.test[1].flatten()).float().mean())
        if loss < self._lowest:
            self._lowest, self.accuracy = loss, accuracy
        self.curve.append(self.accuracy)
        self.losses.append(loss)

    def outcome(self) -> Outcome:
        return Outcome(self.accuracy, self.curve, self.losses)


def scores_and_loss(rnn: nn.RNN, head: nn.Linear, pair: Pair) -> tuple[Tensor, Tensor]:
    """Returns the scores, one row per answer, and the mean cross entropy."""
    inputs, classes = pair
    states, _ = rnn(inputs)
    scores = head(states if classes.dim() == 2 else states[:, -1]).flatten(0, -2)
    return scores, nn.functional.cross_entropy(scores, classes.flatten())


def rescale(rnn: nn.RNN, head: nn.Linear, task: Task) -> None:
    """Rescales a model's initial weights as ADMM does, so that every method can start from the same weights."""
    weights = read_weights(rnn, head)
    write_weights(rescale_weights(weights, read_data(task.train, weights, batch_first=True), list), rnn, head)


def by_admm(
    rnn: nn.RNN,
    head: nn.Linear,
    task: Task,
    epochs: int,
    penalties: admm.Penalties | None = None,
    every: int = EVERY,
) -> Outcome:
    """The package's defaults. After each piece the modules hold the best weights; the state goes on from the last."""
    judge, state = Judge(rnn, head, task), None
    for piece in range(1, epochs // every + 1):
        state = admm.train(
            rnn, head, task.train, iterations=piece * every, batch_size=BATCH, penalties=penalties, state=state
        )
        write_weights(state.weights, rnn, head)
        judge.look()
    return judge.outcome()


def by_optimizer(
    rnn: nn.RNN, head: nn.Linear, task: Task, method: str, rate: float, seed: int, epochs: int, every: int = EVERY
) -> Outcome:
    make, _ = OPTIMIZERS[method]
    optimizer = make([*rnn.parameters(), *head.parameters()], lr=rate)
    judge, generator = Judge(rnn, head, task), torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        one_epoch(rnn, head, task, optimizer, generator)
        if epoch % every == 0:
            judge.look()
    return judge.outcome()


def one_epoch(
    rnn: nn.RNN, head: nn.Linear, task: Task, optimizer: torch.optim.Optimizer, generator: torch.Generator
) -> None:
    inputs, classes = task.train
    for chosen in torch.randperm(len(inputs), generator=generator).split(BATCH):
        loss = scores_and_loss(rnn, head, (inputs[chosen], classes[chosen]))[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
