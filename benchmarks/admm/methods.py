"""One training of a task by one method, under a budget of passes over the training data.

An iteration of ADMM reads the data twice and counts as two passes; an epoch of an optimizer counts as one, though its
backward reads the activations again. All methods are judged alike, at the same passes, and keep the weights with the
lowest training loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.admm.tasks import Pair, Task
from embrace_fx import admm

BATCH = 16
EVERY = 2
"""Passes between two judgements."""

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
    """A training.

    Attributes:
        accuracy: on the test data, of the weights with the lowest training loss.
        curve: test accuracy after every `EVERY` passes, of the weights kept by then.
        wall_s: judgements included.
    """

    accuracy: float
    curve: list[float]
    wall_s: float


class Judge:
    """Follows a model, and remembers how good it was when its training loss was lowest."""

    def __init__(self, rnn: nn.RNN, head: nn.Linear, task: Task) -> None:
        self._rnn, self._head, self._task = rnn, head, task
        self._lowest, self.accuracy = float("inf"), 0.0
        self.curve: list[float] = []

    def look(self) -> None:
        with torch.no_grad():
            loss = float(scores_and_loss(self._rnn, self._head, self._task.train)[1])
            scores, _ = scores_and_loss(self._rnn, self._head, self._task.test)
            accuracy = float((scores.argmax(-1) == self._task.test[1].flatten()).float().mean())
        if loss < self._lowest:
            self._lowest, self.accuracy = loss, accuracy
        self.curve.append(self.accuracy)


def scores_and_loss(rnn: nn.RNN, head: nn.Linear, pair: Pair) -> tuple[Tensor, Tensor]:
    """Scores with a row per answer, and the mean cross entropy."""
    inputs, classes = pair
    states, _ = rnn(inputs)
    scores = head(states if classes.dim() == 2 else states[:, -1]).flatten(0, -2)
    return scores, nn.functional.cross_entropy(scores, classes.flatten())


def train(task: Task, method: str, rate: float | None, seed: int, scale: float, passes: int) -> Outcome:
    """One training.

    Args:
        rate: the learning rate; None for ADMM, which has none.
        scale: of the initial parameters.
    """
    rnn, head = task.modules(seed, scale)
    started_s = time.perf_counter()
    if rate is None:
        accuracy, curve = _by_admm(rnn, head, task, passes)
    else:
        accuracy, curve = _by_optimizer(rnn, head, task, method, rate, seed, passes)
    return Outcome(accuracy, curve, time.perf_counter() - started_s)


def _by_admm(rnn: nn.RNN, head: nn.Linear, task: Task, passes: int) -> tuple[float, list[float]]:
    """The package's defaults. After each piece the modules hold the best weights; the state goes on from the last."""
    judge, state = Judge(rnn, head, task), None
    for iterations in range(1, passes // EVERY + 1):
        state = admm.train(rnn, head, task.train, iterations=iterations, state=state)
        judge.look()
    return judge.accuracy, judge.curve


def _by_optimizer(
    rnn: nn.RNN, head: nn.Linear, task: Task, method: str, rate: float, seed: int, passes: int
) -> tuple[float, list[float]]:
    make, _ = OPTIMIZERS[method]
    optimizer = make([*rnn.parameters(), *head.parameters()], lr=rate)
    judge, generator = Judge(rnn, head, task), torch.Generator().manual_seed(seed)
    inputs, classes = task.train
    for epoch in range(1, passes + 1):
        for chosen in torch.randperm(len(inputs), generator=generator).split(BATCH):
            loss = scores_and_loss(rnn, head, (inputs[chosen], classes[chosen]))[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % EVERY == 0:
            judge.look()
    return judge.accuracy, judge.curve
