"""What one rank alone gives cause to refuse: refused on all within seconds, nothing applied, and training goes on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adagrad

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.sides import DTYPE, Matching, Words, draw_batch
from tests.support.training import whole_parameters, whole_state

LONE, STEPS, LIMIT_S = 1, 5, 20.0


class Asked(Matching):
    """A model whose forward does what the test says on a rank."""

    asked = ""

    def forward(self, words_BL: Tensor, items_B: Tensor, scale: Tensor) -> Tensor:
        if self.asked == "draws":
            scale = scale * random.random()
        if self.asked == "branches" and items_B.sum() > 3:
            scale = scale * 2
        if self.asked == "raises":
            raise KeyError("no such item")
        return super().forward(words_BL, items_B, scale)


def _plainly(model: Any, batch: Words) -> None:
    model(*batch).backward()


def _hooked(model: Any, batch: Words) -> None:
    hook = model.module.first.register_full_backward_hook(lambda module, before, after: None)
    try:
        _plainly(model, batch)
    finally:
        hook.remove()


def _asking(what: str) -> Callable[[Any, Words], None]:
    def call(model: Any, batch: Words) -> None:
        model.module.asked = what
        try:
            _plainly(model, batch)
        finally:
            model.module.asked = ""

    return call


def _sparse(model: Any, batch: Words) -> None:
    model(batch[0].to_sparse(), *batch[1:]).backward()


def _of_another_type(model: Any, batch: Words) -> None:
    model(batch[0].double(), *batch[1:]).backward()


def _with_too_much(model: Any, batch: Words) -> None:
    model(*batch, 1).backward()


def _twice_differentiable(model: Any, batch: Words) -> None:
    model(*batch).backward(create_graph=True)


def _written(model: Any, batch: Words) -> None:
    loss = model(*batch)
    with torch.no_grad():
        model.module.first.weight.mul_(1.0)
    loss.backward()


def _a_layer_replaced(model: Any, batch: Words) -> None:
    first = model.module.first
    model.module.first = nn.Linear(6, 8).to(DTYPE)
    try:
        _plainly(model, batch)
    finally:
        model.module.first = first


CAUSES: dict[str, Callable[[Any, Words], None]] = {
    "a module's backward hook": _hooked,
    "a branch by values": _asking("branches"),
    "an exception of the forward": _asking("raises"),
    "random numbers of Python": _asking("draws"),
    "a sparse argument": _sparse,
    "ids that are no integers": _of_another_type,
    "an argument too many": _with_too_much,
    "create_graph": _twice_differentiable,
    "a parameter that is written": _written,
    "a layer replaced": _a_layer_replaced,
}


def _trained(rank: int, wrap: Callable[[nn.Module], Any], cause: str) -> tuple[dict[str, Tensor], str, list[str]]:
    torch.manual_seed(0)
    plain = Asked().to(DTYPE)
    optimizer = Adagrad(plain.parameters(), 0.1, eps=1e-3)
    model, told, changed = wrap(plain), "", []
    for step in range(STEPS):
        batch = draw_batch(step, rank)
        if step == STEPS // 2:
            if not isinstance(model, embrace_fx.CompiledModel):
                continue
            before, began = _state(model, optimizer), time.perf_counter()
            try:
                (CAUSES[cause] if rank == LONE else _plainly)(model, batch)
            except Exception as error:
                told = f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}"
            assert time.perf_counter() - began < LIMIT_S
            after = _state(model, optimizer)
            changed = [name for name in before if not torch.equal(before[name], after[name])]
        else:
            _plainly(model, batch)
            optimizer.step()
        optimizer.zero_grad()
    found = embrace_fx.full_state_dict(model)
    return {name.removeprefix("module."): value.clone() for name, value in found.items()}, told, changed


def _state(model: Any, optimizer: Any) -> dict[str, Tensor]:
    return whole_parameters(model) | whole_state(model, optimizer)


def _both(rank: int, world_size: int, cause: str) -> Any:
    expected, _, _ = _trained(rank, DistributedDataParallel, cause)
    return (*_trained(rank, lambda m: embrace_fx.compile(m, strategy="alltoall", route="graph"), cause), expected)


@pytest.mark.long
@pytest.mark.parametrize("cause", CAUSES)
def test_all_refuse_what_one_refuses_and_training_goes_on(cause: str) -> None:
    for rank, (found, told, changed, expected) in enumerate(run_ranks(3, _both, cause)):
        assert told, "was not refused"
        if rank != LONE:
            assert f"rank {LONE}" in told or f"rank(s) {LONE}" in told
        assert changed == []
        assert_same(found, expected, DTYPE)
