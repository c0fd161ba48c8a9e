"""What every system of the lab is: prepared once, then trained batch by batch, as its own users would.

    training = peer.prepare(task)
    for loss in training.steps(batches):
        ...

Each rank calls both, with torch.distributed initialised (gloo). The gradient is the mean over ranks everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from benchmarks.models.base import Batch, TableModel, Workload

if TYPE_CHECKING:
    from embrace_fx import CompiledModel

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"adagrad": Adagrad, "sgd": SGD}
"""Those that every system has, that take sparse gradients, and that leave rows without gradient as they are: with them
all systems compute the same parameters."""
ADAGRAD_EPS = 1e-6
"""Above rounding: a parameter whose true gradient is zero must not be moved by what rounding left of it."""


@dataclass(frozen=True)
class Task:
    """What is to be trained.

    Attributes:
        workload: model and batches.
        optimizer: a name of `OPTIMIZERS`.
        learning_rate: of dense parameters and tables alike.
        seed: of the initial parameters.
        rate_mbit: what a rank can send, for systems that plan by it.
        slow: how many times slower than real time everything runs, for systems that look at a clock.
    """

    workload: Workload
    optimizer: str = "adagrad"
    learning_rate: float = 0.01
    seed: int = 0
    rate_mbit: float = 200.0
    slow: float = 1.0

    def model(self) -> TableModel:
        """The same parameters on every rank and in every system."""
        torch.manual_seed(self.seed)
        return self.workload.make()

    def optimizer_options(self) -> dict[str, Any]:
        eps = {"eps": ADAGRAD_EPS} if self.optimizer == "adagrad" else {}
        return {"lr": self.learning_rate, **eps}

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return OPTIMIZERS[self.optimizer](list(parameters), **self.optimizer_options())


@dataclass(frozen=True)
class Recorded:
    """What a system's own recorder saw; empty where it has none."""

    figures: dict[str, Any] = field(default_factory=dict)
    picture: str = ""


def no_recorder(_: Callable[[], None]) -> Recorded:
    return Recorded()


@dataclass(frozen=True)
class Training:
    """A system at work.

    Attributes:
        steps: trains on the batches in order, yielding this rank's loss of each once its update is launched; when it
            is exhausted every update has been applied.
        notes: returns what the system itself decided, for the results; called after the first step.
        record: calls a function that trains some steps, and returns what the system's own recorder saw of them.
        compiled: the compiled model, of a system that can record itself.
    """

    steps: Callable[[Iterable[Batch]], Iterator[Tensor]]
    notes: Callable[[], str] = str
    record: Callable[[Callable[[], None]], Recorded] = no_recorder
    compiled: CompiledModel | None = None


class Peer(Protocol):
    """A system; a frozen dataclass of its options."""

    def prepare(self, task: Task) -> Training:
        """Makes the model and everything that trains it. Collective."""


def ordinary_steps(model: Callable[..., Tensor], optimizer: Optimizer) -> Callable[[Iterable[Batch]], Iterator[Tensor]]:
    """The usual loop."""

    def steps(batches: Iterable[Batch]) -> Iterator[Tensor]:
        for batch in batches:
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    return steps


def with_sparse_tables(model: TableModel, sparse: bool) -> TableModel:
    """The model with `nn.Embedding(sparse=...)` tables."""
    for table in model.embeddings().values():
        table.sparse = sparse
    return model
