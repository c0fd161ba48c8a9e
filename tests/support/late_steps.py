"""Scenarios: what is stepped and zeroed when, by which optimizers, while updates run into the next forward."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import ExponentialLR

from embrace_fx.vocabulary.exactness import ELEMENT_WISE
from tests.support.late_updates import STEPS, Scenarios, Training

SCENARIOS = Scenarios()


def plain(kind: type[Optimizer], training: Training, **options: Any) -> None:
    optimizer = training.optimize(kind, lr=0.1, **options)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.zero_grad()


KINDS = sorted(ELEMENT_WISE - {SparseAdam}, key=lambda kind: kind.__name__)
SCENARIOS |= {f"plain_{kind.__name__}": partial(plain, kind) for kind in KINDS}
SCENARIOS["plain_momentum"] = partial(plain, SGD, momentum=0.9, weight_decay=0.1)
SCENARIOS["plain_LBFGS"] = lambda training: closures(training, LBFGS, max_iter=2)
SCENARIOS["plain_closure"] = lambda training: closures(training, Adagrad)


def closures(training: Training, kind: type[Optimizer], **options: Any) -> None:
    optimizer = training.optimize(kind, lr=0.1, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.tensor(1.0, dtype=torch.float64)
        training.backward()
        return loss

    for _ in range(STEPS):
        training.note(optimizer.step(closure))  # type: ignore[arg-type]


@SCENARIOS.add
def never_zeroes(training: Training) -> None:
    optimizer = training.optimize(SGD, lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()


@SCENARIOS.add
def steps_every_second_time(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for _ in range(STEPS):
        training.backward()
        training.backward()
        optimizer.step()
        optimizer.zero_grad()


@SCENARIOS.add
def drops_a_batch(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for step in range(STEPS):
        training.backward()
        if step % 2:
            optimizer.step()
        optimizer.zero_grad()


@SCENARIOS.add
def steps_twice(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


@SCENARIOS.add
def hooks_after_the_step(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: training.note(training.parameters["a"]))
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.zero_grad()


@SCENARIOS.add
def hooks_before_the_step(training: Training) -> None:
    def halve(*_: Any) -> None:
        for parameter in training.parameters.values():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    optimizer = training.optimize(Adam, lr=0.1)
    optimizer.register_step_pre_hook(halve)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.zero_grad()


@SCENARIOS.add
def hooks_added_after_the_step(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for step in range(STEPS):
        training.backward()
        optimizer.step()
        if step == 1:
            optimizer.register_step_post_hook(lambda *_: training.note(torch.ones(())))
        optimizer.zero_grad()


@SCENARIOS.add
def schedules_the_learning_rate(training: Training) -> None:
    optimizer = training.optimize(SGD, lr=torch.tensor(0.1), momentum=0.9)
    scheduler = ExponentialLR(optimizer, 0.5)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["momentum"] *= 0.9


@SCENARIOS.add
def groups(training: Training) -> None:
    training.parameters["c"].requires_grad_(True)
    optimizer = AdamW([{"params": [training.parameters[n]], "lr": 0.1 * k} for k, n in enumerate("abcd", 1)])
    training.attach(optimizer)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.zero_grad()
    training.log += [state["step"].item() for state in optimizer.state_dict()["state"].values()]
    training.note(optimizer.state_dict()["state"][2]["exp_avg"])


@SCENARIOS.add
def saves_and_loads_the_optimizer(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for step in range(STEPS):
        training.backward()
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        if step % 2:
            optimizer.load_state_dict(state)
        optimizer.zero_grad()


@SCENARIOS.add
def two_optimizers(training: Training) -> None:
    """Of parameters that share buckets; the second steps every second time, over the sum of two gradients."""
    first, second = training.optimize(Adam, "a", "c", lr=0.1), training.optimize(SGD, "b", "d", lr=0.1, momentum=0.9)
    for step in range(2 * STEPS):
        training.backward()
        first.step()
        first.zero_grad()
        if step % 2:
            second.step()
            second.zero_grad()


@SCENARIOS.add
def two_optimizers_of_which_one_drops(training: Training) -> None:
    first, second = training.optimize(Adam, "a", "c", lr=0.1), training.optimize(SGD, "b", "d", lr=0.1, momentum=0.9)
    for step in range(2 * STEPS):
        training.backward()
        first.step()
        if step % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()


@SCENARIOS.add
def two_optimizers_with_a_look_in_between(training: Training) -> None:
    """The second one's gradients are clipped when the first has stepped."""
    first, second = training.optimize(Adam, "a", "c", lr=0.1), training.optimize(SGD, "b", "d", lr=0.1)
    for _ in range(STEPS):
        training.backward()
        first.step()
        training.note(nn.utils.clip_grad_norm_([training.parameters["b"], training.parameters["d"]], 0.1))
        second.step()
        first.zero_grad()
        second.zero_grad()


@SCENARIOS.add
def two_optimizers_of_one_parameter(training: Training) -> None:
    first, second = training.optimize(SGD, lr=0.1), training.optimize(Adam, "a", "b", lr=0.1)
    for _ in range(STEPS):
        training.backward()
        first.step()
        second.step()
        first.zero_grad()


@SCENARIOS.add
def parameters_without_optimizer(training: Training) -> None:
    optimizer = training.optimize(Adam, "a", lr=0.1)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.zero_grad()
    training.synchronize()
    for name in "bcd":
        training.note(training.parameters[name].grad)


@SCENARIOS.add
def averages_parameters(training: Training) -> None:
    """An exponential moving average, from parameters that are read after each step."""
    optimizer = training.optimize(Adam, lr=0.1)
    average = training.parameters["a"].detach().clone()
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.synchronize()
        average.lerp_(training.parameters["a"].detach(), 0.5)
    training.note(average)
