"""A float, an int and a text that are others in each call: few captures, whatever the forward does with them."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.eager.models import Classifier, labelled
from tests.support.inside import captures_of, session_of
from tests.support.ranks import run_ranks


class Annealed(Classifier):
    """Its loss is weighted by two numbers; a text rides along."""

    def forward(  # type: ignore[override]
        self, ids: Tensor, kinds: Tensor, weight: float, step: int, text: str
    ) -> Tensor:
        hidden = self.encode(ids)
        return F.cross_entropy(self.head(hidden), kinds) * weight + min(1.0, step / 100) * hidden.square().mean()


def _train(model: Any, rank: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Losses, milliseconds of processors and MiB in use, by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, took_ms, used = [], [], []
    for step in range(steps):
        began = time.process_time()
        optimizer.zero_grad()
        loss = model(*labelled(step, rank), 1 / (1 + step), step, f"step {step}")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        took_ms.append((time.process_time() - began) * 1e3)
        if step % 100 == 0:
            gc.collect()
            used.append(int(Path("/proc/self/statm").read_text().split()[1]) / 256)
    return losses, took_ms, used


def _both(rank: int, world_size: int, steps: int) -> tuple[bool, int, str, list[float], list[float]]:
    torch.set_default_dtype(torch.float64)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Annealed())
    expected, *_ = _train(DistributedDataParallel(made[0]), rank, steps)
    compiled = embrace_fx.compile(made[1], strategy="alltoall")
    found, took_ms, used = _train(compiled, rank, steps)
    same = torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)
    return same, captures_of(compiled), compiled.plan["rows.weight"].strategy, took_ms, used


def test_numbers_that_never_repeat_are_inputs_of_one_graph() -> None:
    for same, captures, strategy, *_ in run_ranks(2, _both, 8):
        assert same
        assert captures == 2
        assert strategy == "alltoall"


@pytest.mark.long
def test_two_thousand_steps_are_alike() -> None:
    for same, captures, _, took_ms, used in run_ranks(2, _both, 2000):
        assert same
        assert captures <= 3
        assert used[-1] < used[2] + 20
        assert median(took_ms[-500:]) < 2 * median(took_ms[100:600])


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
    """Reads an attribute that the loop anneals."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.scale = nn.Embedding(8, 4), 1.0

    def forward(self, ids: Tensor) -> Tensor:
        return (self.rows(ids) * math.exp(self.scale)).square().sum()  # which Dynamo has for constants alone


IDS = torch.arange(6).view(2, 3)


def _captures(
    forward: Callable[..., Tensor], steps: int = 8, change: Callable[[nn.Module, int], Any] | None = None
) -> int:
    """How many captures a model needs whose argument is the step's number; asserts that each call is the plain one."""
    model = Reading(forward)
    compiled = embrace_fx.compile(model, route="graph")
    for step in range(steps):
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


@pytest.mark.long
def test_what_a_forward_closes_over_is_an_input() -> None:
    held = [1.0]
    assert _captures(lambda m, x, k: x.square().sum() * held[0], change=lambda m, k: held.__setitem__(0, k / 3)) == 2


def test_a_number_that_decides_branches_has_a_capture_for_each_of_them() -> None:
    assert _captures(lambda m, x, k: x.square().sum() * k if k < 4 else x.sum() / k) == 3


@pytest.mark.long
def test_a_number_that_decides_a_shape_is_a_constant() -> None:
    assert _captures(lambda m, x, k: x[:, : k % 3 + 1].square().sum(), steps=3) == 3


class Choosing(Scaled):
    """Looks its number up: a graph holds for one of them."""

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


def _ahead(rank: int, world_size: int) -> list[bool]:
    """Whether each step knows the rows of the next one, while an attribute is annealed."""
    torch.manual_seed(0)
    model: Any = Classifier()
    model.scale, model.encode = 1.0, lambda ids: torch.tanh(model.mid(model.rows(ids).mean(1))) * model.scale
    compiled = embrace_fx.compile(model, strategy="alltoall")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    known = []
    for step, batch in enumerate(compiled.lookahead(labelled(step, rank) for step in range(6))):
        model.scale = 1 / (1 + step)
        compiled(*batch).backward()
        known.append(session_of(compiled).programs.flow._ahead is not None)
        optimizer.step()
        optimizer.zero_grad()
    return known


@pytest.mark.long
def test_rows_are_known_ahead_while_a_number_changes() -> None:
    for known in run_ranks(2, _ahead):
        assert known == [True] * 5 + [False]


def test_the_report_names_the_attribute_that_keeps_changing() -> None:
    model = Scaled()
    compiled = embrace_fx.compile(model)
    for step in range(6):
        model.scale = 1.0 / (1 + step)
        assert compiled(torch.arange(4)).item() == pytest.approx(model(torch.arange(4)).item())
    assert "reads self.scale, which keeps changing" in compiled.report()


def _scale(compiled: Any) -> None:
    for step in range(6):
        compiled.module.scale = 1.0 / (1 + step)
        compiled(torch.arange(4))


def test_the_graph_route_refuses_it() -> None:
    with pytest.raises(embrace_fx.CaptureError, match=r"reads self\.scale, which keeps changing"):
        _scale(embrace_fx.compile(Scaled(), route="graph"))
