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
    """The model to train, with its data and optimizer.

    Attributes:
        workload: model and batches.
        optimizer: a name in `OPTIMIZERS`.
        learning_rate: the learning rate of dense parameters and tables.
        seed: the seed of the initial parameters.
        rate_mbit: the rate at which a rank can send, for systems that use it for planning.
        slow: the factor by which everything runs slower than in real time, for systems that read a clock.
    """

    workload: Workload
    optimizer: str = "adagrad"
    learning_rate: float = 0.01
    seed: int = 0
    rate_mbit: float = 200.0
    slow: float = 1.0

    def model(self) -> TableModel:
        """Returns the model, with the same parameters on every rank and in every system."""
        torch.manual_seed(self.seed)
        return self.workload.make()

    def optimizer_options(self) -> dict[str, Any]:
        eps = {"eps": ADAGRAD_EPS} if self.optimizer == "adagrad" else {}
        return {"lr": self.learning_rate, **eps}

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return OPTIMIZERS[self.optimizer](list(parameters), **self.optimizer_options())


@dataclass(frozen=True)
class Recorded:
    """What the recorder of a system has measured; empty for systems without a recorder."""

    figures: dict[str, Any] = field(default_factory=dict)
    picture: str = ""


def no_recorder(_: Callable[[], None]) -> Recorded:
    return Recorded()


@dataclass(frozen=True)
class Training:
    """A training under one system.

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
    """A system that can train, as a frozen dataclass of its options."""

    def prepare(self, task: Task) -> Training:
        """Creates the model and everything that trains it. Collective."""


def ordinary_steps(model: Callable[..., Tensor], optimizer: Optimizer) -> Callable[[Iterable[Batch]], Iterator[Tensor]]:
    """Returns the usual training loop, as a function that trains on batches and yields losses."""

    def steps(batches: Iterable[Batch]) -> Iterator[Tensor]:
        for batch in batches:
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    return steps


def with_sparse_tables(model: TableModel, sparse: bool) -> TableModel:
    """Returns the model with `nn.Embedding(sparse=...)` tables."""
    for table in model.embeddings().values():
        table.sparse = sparse
    return model
