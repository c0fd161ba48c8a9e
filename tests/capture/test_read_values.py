"""A forward's own constants may change while training: each call computes with those of its moment."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from tests.support.cases import long_but
from tests.support.inside import captures_of

SETTINGS = {"scale": 1.0}
OFFSET = 0.0
GLOBAL = torch.ones(1)


class Scaled(nn.Module):
    """Multiplies its result by values that the forward reads from several places."""

    of_class = 1.0
    linear: Any
    mask: Any

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.dropout = nn.Dropout(0.0)
        self.number = 1.0
        self.numbers = [0.0, 1.0]
        self.tensor = torch.ones(())
        self.read = torch.ones(())
        self.of_numpy: Any = np.float64(1.0)
        self.array = np.ones((), dtype=np.float32)
        self.config = SimpleNamespace(training=False)
        self.linear.weight.gain = 1.0
        self.register_buffer("mask", None)

    def forward(self, x_BD: Tensor) -> Tensor:
        factor = self.of_class * self.number * self.numbers[1] * SETTINGS["scale"]
        factor *= self.read.item() * float(GLOBAL[0]) * self.linear.weight.gain
        if self.config.training or self.mask is not None:
            factor *= 2.0 if self.mask is None else self.mask
        found: Tensor = self.dropout(self.linear(x_BD) * self.of_numpy).square().mean() * self.tensor * factor + OFFSET
        return found * torch.from_numpy(self.array)


def _set_item(model: Any) -> None:
    model.numbers[1] = 3.0


def _set_global(model: Any) -> None:
    globals()["OFFSET"] = 4.0


CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda model: setattr(model, "number", 2.0),
    "an attribute of the class": lambda model: setattr(model, "of_class", 2.0),
    "an item of a list": _set_item,
    "a submodule's option": lambda model: setattr(model.dropout, "p", 1.0),
    "a tensor": lambda model: setattr(model, "tensor", torch.full((), 5.0)),
    "an item of a global": lambda model: SETTINGS.update(scale=4.0),
    "a global": _set_global,
    "a tensor that is read as a number": lambda model: model.read.fill_(3.0),
    "a global tensor that is read as a number": lambda model: GLOBAL.mul_(2.0),
    "a number of NumPy's": lambda model: setattr(model, "of_numpy", np.float64(2.0)),
    "an array": lambda model: setattr(model, "array", np.full((), 2.0, dtype=np.float32)),
    "an array's element": lambda model: model.array.fill(2.0),
    "what is called training": lambda model: setattr(model.config, "training", True),
    "an attribute of a parameter": lambda model: setattr(model.linear.weight, "gain", 2.0),
    "a buffer that was None": lambda model: setattr(model, "mask", torch.full((), 3.0)),
    "a number behind .data": lambda model: model.read.data.fill_(3.0),
}


def _check(model: nn.Module, change: Callable[[Any], object]) -> None:
    compiled = embrace_fx.compile(model)
    x = torch.randn(4, 3)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
    change(model)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))


BY_DEFAULT = (
    *("an item of a list", "a global", "a tensor that is read as a number", "an array's element"),
    *("what is called training", "an attribute of a parameter", "a buffer that was None", "a number behind .data"),
)


@pytest.mark.parametrize("name", long_but(BY_DEFAULT, {name: (name,) for name in CHANGES}))
def test_a_value_that_changes_changes_the_result(name: str) -> None:
    try:
        _check(Scaled(), CHANGES[name])
    finally:
        SETTINGS["scale"] = 1.0
        globals()["OFFSET"] = 0.0
        GLOBAL.fill_(1.0)


def test_a_value_of_a_closure() -> None:
    scale = 1.0

    class Inner(Scaled):
        def forward(self, x_BD: Tensor) -> Tensor:
            return self.linear(x_BD).sum() * scale

    def change(model: Any) -> None:
        nonlocal scale
        scale = 2.0

    _check(Inner(), change)


def test_what_the_forward_does_not_read_may_change_at_every_step() -> None:
    model = Scaled()
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1))
    for step in range(40):
        model.epoch = step  # type: ignore[assignment]
        x = torch.randn(4, 3)
        assert compiled(x).item() == pytest.approx(model(x).item())
    assert captures_of(compiled) == 1


class Random(nn.Module):
    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.draw = draw

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.linear(x_BD).sum() * self.draw()


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())], ids=["random", "numpy"])
def test_random_numbers_of_python_are_drawn_anew_in_each_call(draw: Callable[[], float]) -> None:
    model, x = Random(draw), torch.randn(2, 3)
    compiled = embrace_fx.compile(model)
    for _ in range(3):
        random.seed(3)
        np.random.seed(3)
        found = [compiled(x).item() for _ in range(2)]
        random.seed(3)
        np.random.seed(3)
        assert found == [model(x).item() for _ in range(2)]
        assert found[0] != found[1]


def test_a_parametrized_weight_is_read_by_the_forward_alone() -> None:
    """Spectral normalisation updates its buffers at each read of the weight, which must happen once per call."""
    plain = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)))
    expected, batch = copy.deepcopy(plain), torch.randn(5, 4)
    model = embrace_fx.compile(plain)
    for _ in range(3):
        assert torch.equal(model(batch), expected(batch))
        for (name, own), (_, wanted) in zip(plain.named_buffers(), expected.named_buffers(), strict=True):
            assert torch.equal(own, wanted), name
