"""Scenarios: gradients that user code reads, changes or keeps while they are on their way."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from tests.support.late_updates import STEPS, Scenarios, Training

SCENARIOS = Scenarios()


def loop(training: Training, between: Callable[[Training], None], **zero: Any) -> None:
    """Steps with something between the backward and the step."""
    optimizer = training.optimize(Adam, lr=0.1, weight_decay=0.1)
    for _ in range(STEPS):
        training.backward()
        between(training)
        optimizer.step()
        optimizer.zero_grad(**zero)


@SCENARIOS.add
def reads(training: Training) -> None:
    def between(training: Training) -> None:
        gradient = training.parameters["a"].grad
        assert gradient is not None
        training.note((gradient.norm().item(), gradient[0, 1].item(), float(gradient.sum()), gradient.shape))
        training.note(gradient)
        training.note(gradient.detach().clone() + gradient)
        training.note((gradient > 0).tolist())
        training.note(torch.isfinite(gradient).all().item())

    loop(training, between)


@SCENARIOS.add
def prints(training: Training) -> None:
    """Its class is part of the text, its numbers must be there."""

    def between(training: Training) -> None:
        gradient = training.parameters["b"].grad
        assert gradient is not None
        numbers = re.findall(r"-?\d\.\d+", f"{gradient}")
        assert len(numbers) == gradient.numel(), f"{gradient}"
        training.log += [float(number) for number in numbers]

    loop(training, between)


@SCENARIOS.add
def lists(training: Training) -> None:
    loop(training, lambda t: t.note(t.parameters["b"].grad.tolist()))  # type: ignore[union-attr]


@SCENARIOS.add
def numpys(training: Training) -> None:
    loop(training, lambda t: t.note(t.parameters["b"].grad.cpu().numpy().tolist()))  # type: ignore[union-attr]


@SCENARIOS.add
def copies(training: Training) -> None:
    loop(training, lambda t: t.note(copy.deepcopy(t.parameters["b"].grad)))


@SCENARIOS.add
def saves(training: Training) -> None:
    def between(training: Training) -> None:
        file = io.BytesIO()
        torch.save({"b": training.parameters["b"].grad}, file)
        file.seek(0)
        training.note(torch.load(file, weights_only=True)["b"])

    loop(training, between)


@SCENARIOS.add
def clips_in_place(training: Training) -> None:
    def between(training: Training) -> None:
        for name in ("b", "c"):
            gradient = training.parameters[name].grad
            assert gradient is not None
            gradient.clamp_(-0.1, 0.1)

    loop(training, between)


@SCENARIOS.add
def clips_data(training: Training) -> None:
    """As scripts from before `no_grad` do."""

    def between(training: Training) -> None:
        for parameter in training.parameters.values():
            assert parameter.grad is not None
            training.note(parameter.grad.data.norm(2).item())
            parameter.grad.data.clamp_(-0.1, 0.1)

    loop(training, between)


@SCENARIOS.add
def assigns_data(training: Training) -> None:
    """To gradients that nobody has read."""

    def between(training: Training) -> None:
        for name in ("a", "d"):
            gradient = training.parameters[name].grad
            assert gradient is not None
            gradient.data = torch.full(gradient.shape, 0.25, dtype=torch.float64)

    loop(training, between)


@SCENARIOS.add
def clips_all_at_once(training: Training) -> None:
    def between(training: Training) -> None:
        gradients = [p.grad for p in training.parameters.values() if p.grad is not None]
        training.log += [norm.item() for norm in torch._foreach_norm(gradients)]
        torch._foreach_mul_(gradients, 0.25)

    loop(training, between)


@SCENARIOS.add
def clips_norm(training: Training) -> None:
    loop(training, lambda t: t.note(nn.utils.clip_grad_norm_(t.parameters.values(), 0.5)))


@SCENARIOS.add
def clips_norm_of_some(training: Training) -> None:
    loop(training, lambda t: t.note(nn.utils.clip_grad_norm_([t.parameters["c"]], 0.1, foreach=False)))


@SCENARIOS.add
def clips_value(training: Training) -> None:
    loop(training, lambda t: nn.utils.clip_grad_value_(t.parameters.values(), 0.1))


@SCENARIOS.add
def zeroes(training: Training) -> None:
    loop(training, lambda _: None, set_to_none=False)


@SCENARIOS.add
def zeroes_after_reading(training: Training) -> None:
    loop(training, lambda t: t.note(t.parameters["d"].grad), set_to_none=False)


@SCENARIOS.add
def reads_after_the_step(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        training.note(training.parameters["c"].grad)
        training.synchronize()
        training.note(training.parameters["c"])
        training.note(training.parameters["a"].grad)
        optimizer.zero_grad()


def keeping(training: Training, read: Callable[[int, Tensor], None], read_early: Callable[[int, Tensor], None]) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    kept: list[Tensor] = []
    for step in range(STEPS):
        training.backward()
        gradient = training.parameters["a"].grad
        assert gradient is not None
        kept.append(gradient)
        del gradient
        optimizer.step()
        optimizer.zero_grad()
        read_early(step, kept[-1])
        if step:
            read(step, kept[step - 1])


@SCENARIOS.add
def keeps_the_last_gradient(training: Training) -> None:
    """To compare directions of two steps, say."""
    keeping(training, lambda _, kept: training.note(kept), lambda *_: None)


@SCENARIOS.add
def reads_what_zero_grad_took(training: Training) -> None:
    keeping(training, lambda *_: None, lambda _, kept: training.note(kept))


@SCENARIOS.add
def keeps_gradients_to_the_end(training: Training) -> None:
    optimizer = training.optimize(SGD, lr=0.1)
    kept = []
    for _ in range(STEPS):
        training.backward()
        kept.append([p.grad for p in training.parameters.values()])
        optimizer.step()
        optimizer.zero_grad()
    for gradients in kept:
        for gradient in gradients:
            training.note(gradient)


@SCENARIOS.add
def keeps_a_dropped_gradient(training: Training) -> None:
    """Of a batch that was not stepped."""
    optimizer = training.optimize(SGD, lr=0.1)
    for _ in range(STEPS):
        training.backward()
        kept = training.parameters["a"].grad
        optimizer.zero_grad()
        training.backward()
        training.note(kept)
        optimizer.step()
        optimizer.zero_grad()


@SCENARIOS.add
def replaces_by_half(training: Training) -> None:
    def between(training: Training) -> None:
        gradient = training.parameters["a"].grad
        assert gradient is not None
        training.parameters["a"].grad = gradient * 0.5

    loop(training, between)


@SCENARIOS.add
def replaces_without_looking(training: Training) -> None:
    def between(training: Training) -> None:
        training.parameters["c"].grad = torch.ones_like(training.parameters["c"])

    loop(training, between)


@SCENARIOS.add
def removes_one(training: Training) -> None:
    def between(training: Training) -> None:
        training.parameters["c"].grad = None

    loop(training, between)


@SCENARIOS.add
def gives_one_back(training: Training) -> None:
    def between(training: Training) -> None:
        gradient, training.parameters["b"].grad = training.parameters["b"].grad, None
        training.parameters["b"].grad = gradient

    loop(training, between)


@SCENARIOS.add
def swaps_between_parameters(training: Training) -> None:
    def between(training: Training) -> None:
        training.parameters["c"].grad = training.parameters["a"].grad[:2]  # type: ignore[index]

    loop(training, between)
