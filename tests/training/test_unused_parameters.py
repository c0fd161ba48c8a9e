"""Parameters that a batch, or a rank, does not use: as under DDP with `find_unused_parameters`, None included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad

import embrace_fx
from tests.support.ranks import run_ranks

DTYPE = torch.float64
NUM_IDS, DIM = 12, 4

Gradients = dict[str, Tensor | None]


class Branches(nn.Module):
    """A table and a head of each of two branches, and a trunk; a call takes the branches that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Embedding(NUM_IDS, DIM)
        self.a_ids = nn.Embedding(NUM_IDS, DIM)
        self.a = nn.Linear(DIM, 1)
        self.b_ids = nn.Embedding(NUM_IDS, DIM)
        self.b = nn.Linear(DIM, 1)
        self.never = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor, taken: str, extra: Tensor | None = None) -> Tensor:
        x = self.trunk(ids)
        found = x.square().mean()
        if "a" in taken:
            found = found + self.a(torch.tanh(x + self.a_ids(ids))).mean()
        if "b" in taken:
            found = found + self.b(torch.tanh(x * self.b_ids(ids))).square().mean()
        if extra is not None:
            found = found + self.b(extra).mean()
        loss: Tensor = found
        return loss


class Apart(nn.Module):
    """Two losses in one result."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(NUM_IDS, DIM)
        self.used = nn.Linear(DIM, DIM)
        self.unread = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.used(self.ids(ids))
        return x.square().mean(), self.unread(x.detach()).detach()


def _ids(rank: int, step: int) -> Tensor:
    return torch.randint(NUM_IDS, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


Loop = Callable[[int, Any, Callable[[], None]], None]
"""Trains: told the rank, the model, and what is called when gradients are there, which steps."""


def _gradients(rank: int, loop: Loop, make: Callable[[], nn.Module], wrap: Callable[[nn.Module], Any]) -> Any:
    torch.manual_seed(0)
    plain = make().to(DTYPE)
    model = wrap(plain)
    optimizer = Adagrad(plain.parameters(), 0.1) if isinstance(plain, Branches) else SGD(plain.parameters(), 0.1)
    seen: list[Gradients] = []

    def step() -> None:
        seen.append({name: _whole(model, name, p) for name, p in plain.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()

    loop(rank, model, step)
    return seen, {n: v.clone() for n, v in embrace_fx.full_state_dict(plain).items()}


def _whole(model: Any, name: str, parameter: nn.Parameter) -> Tensor | None:
    """A gradient, of a sharded table by this rank's columns alone."""
    return None if parameter.grad is None else (parameter.grad * 1).detach().clone()


def _compared(rank: int, world_size: int, loop: Loop, make: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    with_ddp = _gradients(rank, loop, make, lambda m: DistributedDataParallel(m, find_unused_parameters=True))
    ours = _gradients(rank, loop, make, lambda m: embrace_fx.compile(m, **options))
    for step, (expected, found) in enumerate(zip(with_ddp[0], ours[0], strict=True)):
        for name, gradient in expected.items():
            assert (gradient is None) == (found[name] is None), (step, name, gradient, found[name])
            if gradient is not None and found[name].shape == gradient.shape:
                torch.testing.assert_close(found[name], gradient, msg=partial("{}: {}".format, (step, name)))
    torch.testing.assert_close(ours[1], with_ddp[1])


def one_loss_of_two(rank: int, model: Any, step: Callable[[], None]) -> None:
    for k in range(3):
        loss, _ = model(_ids(rank, k))
        loss.backward()
        step()


def no_gradient_arrives(rank: int, model: Any, step: Callable[[], None]) -> None:
    for k in range(3):
        loss = model(_ids(rank, k), "ab")
        arriving: Any = torch._C._functions.UndefinedGrad()(loss) if k == 1 else loss
        arriving.backward()
        step()


def other_branches_on_each_rank(rank: int, model: Any, step: Callable[[], None]) -> None:
    """Both at first; then each rank one, each rank the other, one rank none, all the same."""
    for k, taken in enumerate([("ab", "ab"), ("a", "b"), ("b", "a"), ("", "ab"), ("a", "a"), ("", "")]):
        model(_ids(rank, k), taken[rank]).backward()
        step()


def branches_one_by_one(rank: int, model: Any, step: Callable[[], None]) -> None:
    """The first step knows of no branch; one comes with the second, the other with the third, on one rank."""
    for k, taken in enumerate([("", ""), ("a", "a"), ("", "b"), ("ab", "a"), ("b", "")]):
        model(_ids(rank, k), taken[rank]).backward()
        step()


def an_input_on_one_rank(rank: int, model: Any, step: Callable[[], None]) -> None:
    for k in range(3):
        extra = torch.ones((2, DIM), dtype=DTYPE) if rank == k % 2 else None
        model(_ids(rank, k), "a", extra).backward()
        step()


def accumulated(rank: int, model: Any, step: Callable[[], None]) -> None:
    for k, taken in enumerate([("ab", "ab"), ("a", "b"), ("", "a")]):
        with model.no_sync():
            model(_ids(rank, 10 + k), taken[rank]).backward()
            model(_ids(rank, 20 + k), taken[1 - rank]).backward()
        model(_ids(rank, k), taken[rank]).backward()
        step()


LOOPS = (other_branches_on_each_rank, branches_one_by_one, an_input_on_one_rank, accumulated)
SHARDED: dict[Loop, str] = {branches_one_by_one: "trunk.weight", an_input_on_one_rank: "trunk.weight"}
"""The tables that the first step reads, where those are not all."""


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["none", "2d"])
@pytest.mark.parametrize("loop", LOOPS)
def test_branches_that_a_batch_or_a_rank_does_not_take(loop: Loop, schedule: str) -> None:
    for strategy in ("auto", {SHARDED.get(loop, "*"): "alltoall"}):
        run_ranks(2, _compared, loop, Branches, {"schedule": schedule, "strategy": strategy})


@pytest.mark.parametrize("schedule", ["none", "2d"])
def test_a_backward_that_reaches_nothing_leaves_no_gradient(schedule: str) -> None:
    run_ranks(2, _compared, no_gradient_arrives, Branches, {"schedule": schedule})


@pytest.mark.parametrize("schedule", ["none", "2d"])
def test_what_the_loss_is_not_of_has_no_gradient(schedule: str) -> None:
    run_ranks(2, _compared, one_loss_of_two, Apart, {"schedule": schedule})


def _present(rank: int, wrap: Callable[[nn.Module], Any], *, in_place: bool) -> list[list[bool]]:
    """By step, which parameters have a gradient, while ranks run out of batches."""
    torch.manual_seed(0)
    model = wrap(Branches().to(DTYPE))
    optimizer, found = SGD(model.parameters(), 0.1), []
    with model.join():
        for k, taken in enumerate(("ab", "", "a", "", "b", "")[: 3 + 3 * rank]):
            model(_ids(rank, k), taken).backward()
            found.append([parameter.grad is not None for parameter in model.module.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=not in_place)
    return found


def _present_as_under_ddp(rank: int, world_size: int) -> None:
    for in_place in (False, True):
        with_ddp = _present(rank, lambda m: DistributedDataParallel(m, find_unused_parameters=True), in_place=in_place)
        ours = _present(rank, lambda m: embrace_fx.compile(m, strategy="alltoall"), in_place=in_place)
        assert ours == with_ddp


def test_what_a_rank_reached_before_it_ran_out_has_a_gradient_as_under_ddp() -> None:
    run_ranks(2, _present_as_under_ddp)
