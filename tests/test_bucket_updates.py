"""Updates that run into the next forward: whatever user code does in between, it is as if torch had done all at once.

Each scenario is a piece of user code. It runs twice: on two ranks over a flow, where the gradients of its parameters
are reduced and applied late, and in one process over the mean loss of both ranks, in plain torch. What it logs and
where its parameters end must be the same.
"""

from __future__ import annotations

import copy
import functools
import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from embrace_fx.runtime.bucket_updates import BY_PARAMETER, BucketUpdates
from embrace_fx.runtime.communicator import Communicator
from embrace_fx.runtime.flow import Flow
from embrace_fx.runtime.kernels import pack_bucket
from embrace_fx.runtime.launcher import Launcher
from embrace_fx.runtime.optimizers import Stepping, attach
from embrace_fx.runtime.recorder import Recorder
from tests.ranks import run_ranks

WORLD = 2
SHAPES = {"a": (3, 2), "b": (4,), "c": (2, 2), "d": (1,)}
BUCKETS = (("d", "c"), ("b", "a"))
"""The first is reduced whole, the second in two chunks."""

MakeOptimizers = Callable[..., Sequence[Optimizer]]


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
        chunks = [[sum(self.parameters[n].numel() for n in BUCKETS[0])], [6, 4]]
        names = [f"bucket {k} [{i}]" for k, sizes in enumerate(chunks) for i in range(len(sizes))]
        self.launcher = Launcher([(name, "dense") for name in names], (), Recorder())
        self.delivered: list[list[nn.Parameter]] = []
        self.flow = Flow(communicator, self.launcher, Recorder(), False, lambda: None, lambda: None)
        self.flow.buckets = BucketUpdates(
            BUCKETS,
            chunks,
            self.parameter,
            communicator,
            self.launcher,
            self.flow.wait,
            lambda parameters: self.delivered.append(list(parameters)),
            {},
        )

    def attach(self, optimizer: Optimizer) -> None:
        stepping = Stepping(communicator=self._communicator, flow=self.flow)
        attach(optimizer, stepping)

    def backward(self) -> None:
        self.launcher.enter_forward()
        for number in reversed(range(len(BUCKETS))):
            self.flow.await_update(number)
        trained = [name for bucket in BUCKETS for name in bucket]
        gradients = dict(
            zip(
                trained,
                torch.autograd.grad(self.loss(self._communicator.rank), [self.parameters[n] for n in trained]),
                strict=True,
            )
        )
        self.launcher.open_window()
        self.flow.synchronize()
        for k, bucket in enumerate(BUCKETS):
            self.flow.buckets.submit(k, pack_bucket([gradients[name] for name in bucket], 1 / WORLD))
        self.launcher.leave_backward()
        self.flow.buckets.deliver(range(len(BUCKETS)))
        self.step += 1

    def synchronize(self) -> None:
        self.flow.settle()


# -- user code ---------------------------------------------------------------------------------------------------------

STEPS = 4
Scenario = Callable[[Training], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__] = run
    return run


def loop(training: Training, between: Callable[[Training], None], **zero: Any) -> None:
    """Steps with something between the backward and the step."""
    optimizer = training.optimize(Adam, lr=0.1, weight_decay=0.1)
    for _ in range(STEPS):
        training.backward()
        between(training)
        optimizer.step()
        optimizer.zero_grad(**zero)


def plain(kind: type[Optimizer], training: Training, **options: Any) -> None:
    optimizer = training.optimize(kind, lr=0.1, **options)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.zero_grad()


KINDS = sorted(BY_PARAMETER, key=lambda kind: kind.__name__)
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


@scenario
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


@scenario
def prints(training: Training) -> None:
    """Its class is part of the text, its numbers must be there."""

    def between(training: Training) -> None:
        gradient = training.parameters["b"].grad
        assert gradient is not None
        numbers = re.findall(r"-?\d\.\d+", f"{gradient}")
        assert len(numbers) == gradient.numel(), f"{gradient}"
        training.log += [float(number) for number in numbers]

    loop(training, between)


@scenario
def lists(training: Training) -> None:
    loop(training, lambda t: t.note(t.parameters["b"].grad.tolist()))  # type: ignore[union-attr]


@scenario
def numpys(training: Training) -> None:
    loop(training, lambda t: t.note(t.parameters["b"].grad.cpu().numpy().tolist()))  # type: ignore[union-attr]


@scenario
def copies(training: Training) -> None:
    loop(training, lambda t: t.note(copy.deepcopy(t.parameters["b"].grad)))


@scenario
def saves(training: Training) -> None:
    def between(training: Training) -> None:
        file = io.BytesIO()
        torch.save({"b": training.parameters["b"].grad}, file)
        file.seek(0)
        training.note(torch.load(file, weights_only=True)["b"])

    loop(training, between)


@scenario
def clips_in_place(training: Training) -> None:
    def between(training: Training) -> None:
        for name in ("b", "c"):
            gradient = training.parameters[name].grad
            assert gradient is not None
            gradient.clamp_(-0.1, 0.1)

    loop(training, between)


@scenario
def clips_data(training: Training) -> None:
    """As scripts from before `no_grad` do."""

    def between(training: Training) -> None:
        for parameter in training.parameters.values():
            assert parameter.grad is not None
            training.note(parameter.grad.data.norm(2).item())
            parameter.grad.data.clamp_(-0.1, 0.1)

    loop(training, between)


@scenario
def clips_all_at_once(training: Training) -> None:
    def between(training: Training) -> None:
        gradients = [p.grad for p in training.parameters.values() if p.grad is not None]
        training.log += [norm.item() for norm in torch._foreach_norm(gradients)]
        torch._foreach_mul_(gradients, 0.25)

    loop(training, between)


@scenario
def clips_norm(training: Training) -> None:
    loop(training, lambda t: t.note(nn.utils.clip_grad_norm_(t.parameters.values(), 0.5)))


@scenario
def clips_norm_of_some(training: Training) -> None:
    loop(training, lambda t: t.note(nn.utils.clip_grad_norm_([t.parameters["c"]], 0.1, foreach=False)))


@scenario
def clips_value(training: Training) -> None:
    loop(training, lambda t: nn.utils.clip_grad_value_(t.parameters.values(), 0.1))


@scenario
def zeroes(training: Training) -> None:
    loop(training, lambda _: None, set_to_none=False)


@scenario
def zeroes_after_reading(training: Training) -> None:
    loop(training, lambda t: t.note(t.parameters["d"].grad), set_to_none=False)


@scenario
def never_zeroes(training: Training) -> None:
    optimizer = training.optimize(SGD, lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()


@scenario
def steps_every_second_time(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for _ in range(STEPS):
        training.backward()
        training.backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario
def drops_a_batch(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for step in range(STEPS):
        training.backward()
        if step % 2:
            optimizer.step()
        optimizer.zero_grad()


@scenario
def steps_twice(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()


@scenario
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


@scenario
def keeps_the_last_gradient(training: Training) -> None:
    """To compare directions of two steps, say."""
    keeping(training, lambda _, kept: training.note(kept), lambda *_: None)


@scenario
def reads_what_zero_grad_took(training: Training) -> None:
    keeping(training, lambda *_: None, lambda _, kept: training.note(kept))


@scenario
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


@scenario
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


@scenario
def replaces_by_half(training: Training) -> None:
    def between(training: Training) -> None:
        gradient = training.parameters["a"].grad
        assert gradient is not None
        training.parameters["a"].grad = gradient * 0.5

    loop(training, between)


@scenario
def replaces_without_looking(training: Training) -> None:
    def between(training: Training) -> None:
        training.parameters["c"].grad = torch.ones_like(training.parameters["c"])

    loop(training, between)


@scenario
def removes_one(training: Training) -> None:
    def between(training: Training) -> None:
        training.parameters["c"].grad = None

    loop(training, between)


@scenario
def gives_one_back(training: Training) -> None:
    def between(training: Training) -> None:
        gradient, training.parameters["b"].grad = training.parameters["b"].grad, None
        training.parameters["b"].grad = gradient

    loop(training, between)


@scenario
def swaps_between_parameters(training: Training) -> None:
    def between(training: Training) -> None:
        training.parameters["c"].grad = training.parameters["a"].grad[:2]  # type: ignore[index]

    loop(training, between)


@scenario
def hooks_after_the_step(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: training.note(training.parameters["a"]))
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario
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


@scenario
def hooks_added_after_the_step(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for step in range(STEPS):
        training.backward()
        optimizer.step()
        if step == 1:
            optimizer.register_step_post_hook(lambda *_: training.note(torch.ones(())))
        optimizer.zero_grad()


@scenario
def schedules_the_learning_rate(training: Training) -> None:
    optimizer = training.optimize(SGD, lr=torch.tensor(0.1), momentum=0.9)
    scheduler = ExponentialLR(optimizer, 0.5)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["momentum"] *= 0.9


@scenario
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


@scenario
def saves_and_loads_the_optimizer(training: Training) -> None:
    optimizer = training.optimize(Adam, lr=0.1)
    for step in range(STEPS):
        training.backward()
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        if step % 2:
            optimizer.load_state_dict(state)
        optimizer.zero_grad()


@scenario
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


@scenario
def two_optimizers_of_which_one_drops(training: Training) -> None:
    first, second = training.optimize(Adam, "a", "c", lr=0.1), training.optimize(SGD, "b", "d", lr=0.1, momentum=0.9)
    for step in range(2 * STEPS):
        training.backward()
        first.step()
        if step % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()


@scenario
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


@scenario
def two_optimizers_of_one_parameter(training: Training) -> None:
    first, second = training.optimize(SGD, lr=0.1), training.optimize(Adam, "a", "b", lr=0.1)
    for _ in range(STEPS):
        training.backward()
        first.step()
        second.step()
        first.zero_grad()


@scenario
def parameters_without_optimizer(training: Training) -> None:
    optimizer = training.optimize(Adam, "a", lr=0.1)
    for _ in range(STEPS):
        training.backward()
        optimizer.step()
        optimizer.zero_grad()
    training.synchronize()
    for name in "bcd":
        training.note(training.parameters[name].grad)


@scenario
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


# -- both ways ---------------------------------------------------------------------------------------------------------


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


def all_scenarios(rank: int, world_size: int) -> dict[str, list[Any] | str]:
    communicator = Communicator(dist.group.WORLD)
    communicator.open_lanes()
    return {name: finish(Deferred(communicator), run) for name, run in SCENARIOS.items()}


@functools.cache
def found() -> list[dict[str, list[Any] | str]]:
    return run_ranks(WORLD, all_scenarios)


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_in_plain_torch(name: str) -> None:
    expected = finish(Training(), SCENARIOS[name])

    for of_rank in found():
        assert not isinstance(of_rank[name], str), of_rank[name]
        torch.testing.assert_close(of_rank[name], expected, rtol=1e-12, atol=1e-12)
