"""User code run twice: over a flow, where dense gradients are reduced and applied late, and in plain torch.

A scenario is a piece of user code. It runs on two ranks over a flow, and in one process over the mean loss of both
ranks. What it logs and where its parameters end must be the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.flow.bucket_updates import BucketUpdates
from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.kernels import pack_bucket
from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.ranks.announcement import Announcements
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.stepping import Stepping
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.operation_id import chunk_id

WORLD = 2
STEPS = 4
SHAPES = {"a": (3, 2), "b": (4,), "c": (2, 2), "d": (1,)}
BUCKETS = (("d", "c"), ("b", "a"))
"""The first is reduced whole, the second in two chunks."""


def factor(name: str, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], dtype=torch.float64, generator=generator)


class Training:
    """A model whose loss is quadratic in its parameters: a gradient tells which values it was computed from.

    Attributes:
        log: what the scenario has seen.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.parameters = {
            name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in SHAPES.items()
        }
        self.log: list[Any] = []
        self.step = 0

    def parameter(self, name: str) -> nn.Parameter:
        return self.parameters[name]

    def optimize(self, kind: Callable[..., Optimizer], *names: str, **options: Any) -> Optimizer:
        """An optimizer of some parameters, of all where none is named."""
        found = kind([self.parameters[name] for name in names or SHAPES], **options)
        self.attach(found)
        return found

    def attach(self, optimizer: Optimizer) -> None:
        """What compile does to an optimizer."""

    def backward(self) -> None:
        """A forward and a backward of the next batch."""
        losses = [self.loss(rank) for rank in range(WORLD)]
        (sum(losses, torch.zeros(())) / WORLD).backward()
        self.step += 1

    def loss(self, rank: int) -> Tensor:
        terms = [(p.square() * factor(n, self.step, rank) + p).sum() for n, p in self.parameters.items()]
        return torch.stack(terms).sum()

    def synchronize(self) -> None:
        """What `state_dict()` and the like do."""

    def note(self, value: Any) -> None:
        self.log.append(copy.deepcopy(value.detach()) if isinstance(value, Tensor) else value)


class Deferred(Training):
    """The same over a flow, in the order in which a program calls it."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator
        self._chunks = [[sum(self.parameters[n].numel() for n in BUCKETS[0])], [6, 4]]
        order = [chunk_id(k, i) for k, sizes in enumerate(self._chunks) for i in range(len(sizes))]
        self.launcher = Launcher(order, (), LaunchQueue(Recorder()), communicator)
        buckets = BucketUpdates(BUCKETS, self.parameter, communicator, self.launcher, {})
        self.flow = Flow(
            Announcements(communicator),
            self.launcher,
            {},
            buckets,
            looks_ahead=False,
            warn=lambda: None,
            after_announcement=lambda: None,
        )
        self.buckets = buckets
        state = ModelState(nn.ParameterDict(self.parameters))
        self.stepping = Stepping(state, communicator, lambda names, reason: None)
        self.stepping.follow(self.flow, self.launcher.recorder)

    def attach(self, optimizer: Optimizer) -> None:
        self.stepping.adopt(optimizer)

    def backward(self) -> None:
        self.launcher.enter_forward()
        for number in reversed(range(len(BUCKETS))):
            self.buckets.update_bucket([], number)
        trained = [name for bucket in BUCKETS for name in bucket]
        gradients = dict(
            zip(
                trained,
                torch.autograd.grad(self.loss(self._communicator.rank), [self.parameters[n] for n in trained]),
                strict=True,
            )
        )
        self.launcher.open_window()
        self.flow.settle()
        for k, bucket in enumerate(BUCKETS):
            flat, start = pack_bucket([gradients[name] for name in bucket], 1 / WORLD), 0
            for i, length in enumerate(self._chunks[k]):
                self.buckets.submit_chunk(chunk_id(k, i), flat, start, length, "")
                start += length
            self.buckets.hand_over(flat, k)
        self.launcher.leave_backward()
        self.buckets.deliver(range(len(BUCKETS)))
        self.step += 1

    def synchronize(self) -> None:
        self.flow.settle()


Scenario = Callable[[Training], None]


class Scenarios(dict[str, Scenario]):
    """Pieces of user code by name."""

    def add(self, run: Scenario) -> Scenario:
        self[run.__name__] = run
        return run


def finish(training: Training, run: Scenario) -> list[Any] | str:
    """What the scenario logged, then its final parameters and gradients; or why it came to nothing."""
    try:
        run(training)
        training.synchronize()
        training.log += [parameter.detach() for parameter in training.parameters.values()]
        training.log += [None if p.grad is None else p.grad + 0 for p in training.parameters.values()]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return training.log
