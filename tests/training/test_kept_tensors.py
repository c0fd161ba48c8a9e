"""Loops that keep gradients, data and state from one moment to another, next to DDP on the same ranks, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import embrace_fx
from tests.support.part_deeds import ROWS, WIDTH, Tagger
from tests.support.parts import differs, whole_of
from tests.support.ranks import run_ranks

LOOPS: dict[str, Callable[[Any], Any]] = {}
KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda p: AdamW(p, 0.02, eps=1e-3),
    "sgd": lambda p: SGD(p, 0.3, momentum=0.5),
}
REFUSED = ("a_sum_is_asked_for", "a_view_of_a_sum_is", "a_sum_is_clamped")
"""What is not reduced yet under DDP."""


class Loop:
    """A training beneath its loop."""

    def __init__(self, model: Any, kind: str, rank: int) -> None:
        self.model, self.rank, self.count = model, rank, 0
        self.optimizer = KINDS[kind](model.parameters())
        self.table: nn.Parameter = model.module.emb.weight
        self.parameters: list[nn.Parameter] = list(model.parameters())

    @property
    def gradients(self) -> list[Any]:
        return [parameter.grad for parameter in self.parameters]

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's, of the table."""
        found: dict[str, Any] = self.optimizer.state[self.table]
        return found

    def backward(self) -> None:
        draw = torch.Generator().manual_seed(10 * self.count + self.rank)
        self.count += 1
        ids, tags = torch.randint(ROWS, (4, 3), generator=draw), torch.randint(3, (4,), generator=draw)
        self.model(ids, tags).backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()


def loop(function: Callable[[Loop], Any]) -> Callable[[Loop], Any]:
    LOOPS[function.__name__] = function
    return function


@loop
def a_kept_gradient_grows(loop: Loop) -> Any:
    loop.backward()
    kept = loop.gradients
    loop.backward()
    for gradient in kept:
        gradient.mul_(0.5)
    loop.optimizer.step()
    return kept


@loop
def a_kept_gradient_is_zeroed_and_used_again(loop: Loop) -> Any:
    loop.backward()
    kept = loop.gradients
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    for gradient in kept:
        gradient[:1] = 0.25
    loop.optimizer.step()
    return kept


@loop
def a_kept_view_of_a_gradient_is_used_again(loop: Loop) -> Any:
    loop.backward()
    kept = [gradient.view(-1) for gradient in loop.gradients]
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.backward()
    found = [view.sum() for view in kept]
    loop.optimizer.step()
    return found


@loop
def a_kept_sum_is_reduced(loop: Loop) -> Any:
    with loop.model.no_sync():
        loop.backward()
    kept = loop.gradients
    loop.backward()
    found = [gradient.sum() for gradient in kept]
    for gradient in kept:
        gradient[:1] = 0.1
    loop.optimizer.step()
    return found


@loop
def rows_of_a_sum_are_scaled(loop: Loop) -> Any:
    with loop.model.no_sync():
        loop.backward()
        loop.gradients[0][2:5].mul_(0.5)
        loop.gradients[0][7] = 0.0
    loop.backward()
    found = loop.gradients[0].norm()
    loop.optimizer.step()
    return found


@loop
def a_sum_is_asked_for(loop: Loop) -> Any:
    with loop.model.no_sync():
        loop.backward()
    return loop.gradients[0].norm()


@loop
def a_view_of_a_sum_is(loop: Loop) -> Any:
    with loop.model.no_sync():
        loop.backward()
    return loop.gradients[0][2:5].sum()


@loop
def a_sum_is_clamped(loop: Loop) -> None:
    with loop.model.no_sync():
        loop.backward()
    nn.utils.clip_grad_value_(loop.parameters, 1e-4)


@loop
def data_is_exchanged_and_put_back(loop: Loop) -> Any:
    kept = [parameter.data for parameter in loop.parameters]
    for parameter in loop.parameters:
        parameter.data = parameter.data * 0.5
    with torch.no_grad():
        found = loop.model(torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
    for parameter, data in zip(loop.parameters, kept, strict=True):
        parameter.data = data
    return found


@loop
def data_is_exchanged_trained_and_put_back(loop: Loop) -> None:
    kept = [parameter.data for parameter in loop.parameters]
    for parameter in loop.parameters:
        parameter.data = parameter.data.clone()
    loop.step()
    for parameter, data in zip(loop.parameters, kept, strict=True):
        parameter.data = data


@loop
def all_data_are_views_of_a_vector(loop: Loop) -> None:
    count = sum(parameter.numel() for parameter in loop.parameters)
    nn.utils.vector_to_parameters(torch.linspace(-1, 1, count, dtype=torch.float64), loop.parameters)


@loop
def state_is_another_whole_one(loop: Loop) -> None:
    for key, value in list(loop.state.items()):
        if isinstance(value, Tensor) and value.dim():
            loop.state[key] = torch.linspace(0, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)


@loop
def kept_state_is_halved(loop: Loop) -> None:
    kept = [value for state in loop.optimizer.state.values() for value in state.values()]
    kept = [value for value in kept if isinstance(value, Tensor) and value.dim()]
    loop.step()
    for value in kept:
        value.mul_(0.5)


@loop
def rows_are_scaled_by_their_ids(loop: Loop) -> None:
    loop.backward()
    loop.gradients[0][[-1, 3]] *= 3
    loop.gradients[0][torch.arange(ROWS) > 9] += 0.1
    loop.optimizer.step()


def _train(rank: int, kind: str, refused: dict[str, str] | None) -> tuple[dict[str, Any], dict[str, str]]:
    """What loops found, and the parameters and the state after each; and what was refused.

    Args:
        refused: which of them DDP leaves out; None: under a compiled model.
    """
    torch.manual_seed(0)
    plain = Tagger().double()
    begin = {f"module.{name}": value.clone() for name, value in plain.state_dict().items()}
    model: Any = embrace_fx.compile(plain, strategy="alltoall") if refused is None else DistributedDataParallel(plain)
    found: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, run in LOOPS.items():
        model.load_state_dict(begin)
        model.zero_grad()
        loop, answer = Loop(model, kind, rank), None
        for _ in range(2):
            loop.step()
        loop.optimizer.zero_grad()
        try:
            answer = _numbers(run(loop)) if refused is None or name not in refused else None
        except RuntimeError as error:
            if refused is not None:
                raise
            errors[name] = str(error)
        if name in (errors if refused is None else refused):
            continue
        for _ in range(2):
            loop.step()
        whole = embrace_fx.full_state_dict(model)
        found[name] = answer, _numbers([dict(loop.optimizer.state[p]) for p in loop.parameters]), _numbers(whole)
    if refused is None:
        model.close()
    return found, errors


def _numbers(answer: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), whole_of(answer))


def _both(rank: int, world_size: int, kind: str) -> tuple[dict[str, str], dict[str, str]]:
    found, refused = _train(rank, kind, None)
    expected, _ = _train(rank, kind, refused)
    return {name: how for name, values in found.items() if (how := differs(values, expected[name]))}, refused


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_loops_that_keep_tensors_do_as_under_ddp(kind: str, ranks: int) -> None:
    for wrong, refused in run_ranks(ranks, _both, kind):
        assert not wrong
        assert tuple(refused) == REFUSED
        for told in refused.values():
            assert "expected " in told
            assert "emb.weight" in told
            assert "no_sync()" in told
