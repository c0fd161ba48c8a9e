"""A rank fails under the eager route: all ranks hear of it within seconds, nothing is applied, training goes on."""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import embrace_fx
from tests.eager.models import Asserting, Turning, labelled
from tests.support.beside import train
from tests.support.ranks import run_ranks

SOON_S = 20.0
"""Far below the process group's timeout, on a machine that is busy."""


class _Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ZeroDivisionError("in the backward")


class Failing(Asserting):
    """Raises an error where the test says."""

    where = ""

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        assert (ids >= 0).all()
        hidden = self.encode(ids)
        if self.where == "forward":
            raise ZeroDivisionError("in the forward")
        if self.where == "backward":
            hidden = _Bad.apply(hidden)  # type: ignore[no-untyped-call]
        loss = F.cross_entropy(self.head(hidden), kinds)
        return loss * float("nan") if self.where == "loss" else loss


def _failing(rank: int, world_size: int, where: str) -> tuple[str, float, list[Tensor]]:
    torch.manual_seed(0)
    model: Any = Failing()
    compiled = embrace_fx.compile(model, route="eager")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    told, took_s = "", 0.0
    for step in range(4):
        optimizer.zero_grad()
        model.where = where if (rank, step) == (1, 2) else ""
        began = time.monotonic()
        try:
            compiled(*labelled(step, rank)).backward()
        except Exception as error:
            told, took_s = f"{type(error).__name__}: {error}", time.monotonic() - began
            assert all(parameter.grad is None for parameter in model.parameters())
            continue
        optimizer.step()
    return told, took_s, [parameter.detach() for parameter in model.parameters()]


def _good(rank: int, world_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    compiled = embrace_fx.compile(Failing(), route="eager")
    train(compiled, [labelled(step, rank) for step in (0, 1, 3)], partial(torch.optim.AdamW, lr=0.1))
    return [parameter.detach() for parameter in compiled.module.parameters()]


@pytest.mark.parametrize(
    ("where", "own", "other"),
    [
        ("forward", "ZeroDivisionError: in the forward", "PeerFailure: rank 1: ZeroDivisionError: in the forward"),
        ("backward", "ZeroDivisionError: in the backward", "PeerFailure: rank 1: the backward failed on this rank"),
        pytest.param(
            *("loss", "FloatingPointError: backward(): the loss", "FloatingPointError: backward(): the loss"),
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:All ranks abandoned the previous call:RuntimeWarning")
def test_a_rank_that_fails_fails_all_ranks(where: str, own: str, other: str) -> None:
    (first, first_s, parameters), (second, second_s, _) = run_ranks(2, _failing, where)
    assert first.startswith(other), first
    assert second.startswith(own), second
    assert max(first_s, second_s) < SOON_S
    for found, expected in zip(parameters, run_ranks(2, _good)[0], strict=True):
        torch.testing.assert_close(found, expected)


def _other_routes(rank: int, world_size: int) -> list[str]:
    """On rank 1 the second batch leads where no graph follows."""
    torch.manual_seed(0)
    model = Turning()
    compiled = embrace_fx.compile(model, strategy="alltoall")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    strategies = []
    for step in range(4):
        compiled(*labelled(step, rank), turns=rank == 1 and step >= 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        strategies.append(compiled.plan["rows.weight"].strategy)
    return [*strategies, compiled.report().rpartition("route: ")[2]]


def test_steps_are_recorded_and_the_graphs_say_why_they_are_not_of_the_forward() -> None:
    compiled = embrace_fx.compile(Asserting(), route="eager")
    with compiled.record():
        for step in range(3):
            compiled(*labelled(step, 0)).backward()
    assert {span.operation.name for span in compiled.timeline.spans} >= {"forward", "backward"}
    assert compiled.graphs.reason == "route='eager' was requested"


def test_all_ranks_leave_the_graph_with_the_first_one_that_has_to() -> None:
    for *strategies, route in run_ranks(2, _other_routes):
        assert strategies[:2] == ["alltoall", "alltoall"]
        assert strategies[2:] == ["allreduce", "allreduce"]
        assert "eager/models.py" in route
        assert "Data-dependent" in route


class _Towers(torch.nn.Module):
    """Returns two results, which may share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1), torch.nn.Linear(3, 3)

    def forward(self, x: Tensor, shares: bool) -> tuple[Tensor, Tensor]:
        hidden = self.both(x) if shares else x
        return self.first(hidden).square().mean(), self.second(hidden).square().mean()


def _second(rank: int, world_size: int) -> tuple[str, list[Tensor]]:
    torch.manual_seed(0)
    compiled = embrace_fx.compile(_Towers(), route="eager")
    told, gradients = "", []
    for shares in (False, True, False):
        compiled.zero_grad()
        first, second = compiled(torch.full((2, 3), 1.0 + rank), shares)
        first.backward(retain_graph=True)
        try:
            second.backward()
        except RuntimeError as error:
            told += str(error)
        gradients += [each.grad.clone() for each in compiled.parameters() if each.grad is not None]
    return told, gradients


def test_a_gradient_that_was_reduced_is_not_added_to_again() -> None:
    (told, gradients), (other, same) = run_ranks(2, _second)
    assert told == other
    assert told.count("a second time for the results of the same call") == 1
    assert len(gradients) == 4 + 4 + 4
    for one, another in zip(gradients, same, strict=True):
        assert torch.equal(one, another)


def _without_gradients(rank: int, world_size: int) -> bool:
    """Steps an optimizer without gradients after a backward of two calls, as DDP allows."""
    torch.manual_seed(0)
    towers = _Towers()
    compiled = embrace_fx.compile(towers, route="eager")
    optimizer = torch.optim.SGD(towers.both.parameters(), 0.1)
    one, other = (compiled(torch.full((2, 3), x), False) for x in (1.0, 2.0))
    torch.stack([*one, *other]).sum().backward()
    before = towers.both.weight.clone()
    optimizer.step()
    return torch.equal(before, towers.both.weight)


def test_an_optimizer_without_gradients_steps_nothing_after_a_backward_of_two_calls() -> None:
    assert run_ranks(2, _without_gradients) == [True, True]


class _Rescaled(torch.nn.Module):
    """Looks up rows with `max_norm`, in a forward that is not captured."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.words.weight, max_norm=1.0).square().mean()


def _logged(rank: int, world_size: int) -> list[str]:
    lines: list[str] = []
    compiled = embrace_fx.compile(_Rescaled(), route="eager")
    with mock.patch("embrace_fx.session.eager_calls.log", lambda line, *names: lines.append(line % names)):
        for _ in range(3):
            compiled(torch.arange(rank, 9)).backward()
    return [line for line in lines if "writes a table (words.weight)" in line]


def test_a_forward_that_rescales_rows_as_written_is_logged_once() -> None:
    assert [len(lines) for lines in run_ranks(2, _logged)] == [1, 0]
