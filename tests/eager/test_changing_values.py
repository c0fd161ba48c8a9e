"""A float, an int and a text that are others in each call: few captures, whatever the forward does with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.eager.models import Classifier, labelled
from tests.support.beside import take_steps
from tests.support.inside import captures_of
from tests.support.ranks import run_ranks


class Annealed(Classifier):
    """Weights its loss by two numbers, and ignores a string argument."""

    def forward(  # type: ignore[override]
        self, ids: Tensor, kinds: Tensor, weight: float, step: int, text: str
    ) -> Tensor:
        hidden = self.encode(ids)
        return F.cross_entropy(self.head(hidden), kinds) * weight + min(1.0, step / 100) * hidden.square().mean()


def _train(model: Any, rank: int) -> list[float]:
    batches = [(*labelled(step, rank), 1 / (1 + step), step, f"step {step}") for step in range(8)]
    return [loss.item() for loss in take_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)]


def _both(rank: int, world_size: int) -> tuple[bool, int, str]:
    torch.set_default_dtype(torch.float64)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Annealed())
    compiled = embrace_fx.compile(made[1], strategy="alltoall")
    found, expected = _train(compiled, rank), _train(DistributedDataParallel(made[0]), rank)
    same = torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)
    return same, captures_of(compiled), compiled.plan["rows.weight"].strategy


@pytest.mark.long
def test_numbers_that_never_repeat_are_inputs_of_one_graph() -> None:
    assert run_ranks(2, _both) == [(True, 2, "alltoall")] * 2


class Reading(nn.Module):
    """Reads what a test's own forward reads, besides ids."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4)
        self.scale, self.calls, self.shift = 1.0, 0, torch.zeros(4)
        self.own_forward = forward

    def forward(self, ids: Tensor, *args: Any) -> Tensor:
        return self.own_forward(self, self.rows(ids), *args)


class Scaled(nn.Module):
    """Reads an attribute that the training loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.scale = nn.Embedding(8, 4), 1.0

    def forward(self, ids: Tensor) -> Tensor:
        return (self.rows(ids) * math.exp(self.scale)).square().sum()  # Dynamo supports math.exp only for constants


IDS = torch.arange(6).view(2, 3)


def _captures(forward: Callable[..., Tensor], change: Callable[[nn.Module, int], Any] | None = None) -> int:
    """How many captures a model needs whose argument is the step's number; asserts that each call is the plain one."""
    model = Reading(forward)
    compiled = embrace_fx.compile(model, route="graph")
    for step in range(8):
        if change is not None:
            change(model, step)
        found, expected = compiled(IDS, step), model(IDS, step)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(each, model.rows.weight)[0] for each in (expected,)]
        found.backward()
        assert model.rows.weight.grad is not None
        torch.testing.assert_close(model.rows.weight.grad, gradients[0])
        model.rows.weight.grad = None
    return captures_of(compiled)


def _anneal(model: Any, step: int) -> None:
    model.scale, model.calls, model.shift = 1 / (1 + step), step, torch.full((4,), step / 3)


def test_attributes_that_change_are_inputs() -> None:
    assert _captures(lambda m, x, k: ((x + m.shift) / m.scale).square().sum() * m.calls, change=_anneal) == 2


def test_a_number_that_decides_branches_has_a_capture_for_each_of_them() -> None:
    assert _captures(lambda m, x, k: x.square().sum() * k if k < 4 else x.sum() / k) == 3


class Choosing(Scaled):
    """Looks up a number in a dict, so that a graph is valid for one number only."""

    count = 0

    def forward(self, ids: Tensor) -> Tensor:
        scales = {number: 1.0 + number for number in range(40)}
        return self.rows(ids).square().sum() * scales[self.count]


@pytest.mark.long
def test_the_report_names_a_number_of_which_each_value_has_a_graph() -> None:
    model: Any = Choosing()
    compiled = embrace_fx.compile(model)
    for model.count in range(14):
        compiled(torch.arange(4))
    assert captures_of(compiled) < 12
    assert "reads self.count, which keeps changing" in compiled.report()


def test_the_report_names_the_attribute_that_keeps_changing() -> None:
    model = Scaled()
    compiled = embrace_fx.compile(model)
    for step in range(6):
        model.scale = 1.0 / (1 + step)
        assert compiled(torch.arange(4)).item() == pytest.approx(model(torch.arange(4)).item())
    assert "reads self.scale, which keeps changing" in compiled.report()


class Bundle:
    def __init__(self, ids: Tensor, gain: float) -> None:
        self.ids, self.gain = ids, gain


class OfBundle(Scaled):
    def forward(self, batch: Any) -> Tensor:
        return self.rows(batch.ids).square().sum() * batch.gain


def test_the_report_names_the_object_whose_value_keeps_changing() -> None:
    compiled: Any = embrace_fx.compile(OfBundle())
    for step in range(6):
        compiled(Bundle(torch.arange(4), float(step)))
    assert "reads a value of the argument batch, which keeps changing" in compiled.report()


def _scale(compiled: Any) -> None:
    for step in range(6):
        compiled.module.scale = 1.0 / (1 + step)
        compiled(torch.arange(4))


def test_the_graph_route_refuses_it() -> None:
    with pytest.raises(embrace_fx.CaptureError, match=r"reads self\.scale, which keeps changing"):
        _scale(embrace_fx.compile(Scaled(), route="graph"))
