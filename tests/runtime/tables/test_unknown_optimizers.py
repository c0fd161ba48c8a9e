"""Optimizers that nobody told of, that are nobody's known class, or that need whole tables; and closures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, RAdam

import embrace_fx
from embrace_fx.vocabulary.exactness import whole_table_reason
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import whole_parameters
from tests.support.words import Batch, words_batch, words_model


class OwnSGD(SGD):
    """A subclass of SGD, which could override anything as far as the library knows."""


class Promised(SGD):
    """Declares that it computes what its base class computes."""

    element_wise = True


class Trusting(Optimizer):
    """Divides a step by the norm of the gradient, as LAMB and LARS do in their ways."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad / (1 + parameter.grad.norm()))
        return loss


class Declared(Trusting):
    """Makes a wrong declaration about itself, which the library trusts."""

    element_wise = True


def _line_search(parameters: Any) -> Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3, line_search_fn="strong_wolfe")


OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "OwnSGD": (partial(OwnSGD, lr=0.1, momentum=0.9), "allreduce"),
    "Promised": (partial(Promised, lr=0.1, momentum=0.9), "alltoall"),
    "RAdam": (partial(RAdam, lr=0.1, eps=1e-3), "alltoall"),
    "Trusting": (Trusting, "allreduce"),
    "LBFGS": (_line_search, "allreduce"),
}


def _losses(model: nn.Module, batches: Sequence[Batch]) -> list[Tensor]:
    return [model(*batch) for batch in batches]


def _closure(optimizer: Optimizer, losses: Callable[[], Sequence[Tensor]]) -> Callable[[], Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.stack([*losses()]).mean()
        loss.backward()
        return loss

    return closure


Told = Literal["before", "given", "after"]
"""When the optimizer is made: before compile and given to it or not, or after it."""


def _steps(name: str, optimizer: Optimizer, losses: Callable[[int], Sequence[Tensor]]) -> None:
    """With closures, and where the optimizer can do without, one without."""
    for step in range(3):
        optimizer.step(_closure(optimizer, partial(losses, step)))
    if name != "LBFGS":
        optimizer.zero_grad()
        torch.stack([*losses(3)]).mean().backward()
        optimizer.step()


def _train(rank: int, world_size: int, name: str, told: Told) -> tuple[str, str, dict[str, Tensor]]:
    plain = words_model()
    make = OPTIMIZERS[name][0]
    optimizer = make(plain.parameters()) if told != "after" else None
    model = embrace_fx.compile(plain, optimizer=optimizer if told == "given" else None, strategy="alltoall")
    optimizer = optimizer or make(model.parameters())
    _steps(name, optimizer, lambda step: _losses(model, [words_batch(step, rank)]))
    decision = model.plan["table.weight"]
    return decision.strategy, decision.reason, whole_parameters(model)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        pytest.param("OwnSGD", "before", marks=pytest.mark.long),
        ("Promised", "before"),
        pytest.param("RAdam", "given", marks=pytest.mark.long),
        pytest.param("Trusting", "after", marks=pytest.mark.long),
        ("Trusting", "given"),
        ("LBFGS", "after"),
    ],
)
def test_tables_are_sharded_where_an_optimizer_is_element_wise_and_whole_where_it_is_not(name: str, told: Told) -> None:
    make, wanted = OPTIMIZERS[name]
    model = words_model()
    optimizer = make(model.parameters())
    _steps(name, optimizer, lambda step: _losses(model, [words_batch(step, rank) for rank in range(2)]))
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for strategy, reason, parameters in run_ranks(2, _train, name, told):
        assert strategy == wanted
        if wanted == "allreduce":
            assert reason.startswith(name)
            assert ("element_wise = True" in reason) is (name != "LBFGS")
        assert_same(parameters, expected, torch.float64)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (partial(SGD, lr=0.1), True),
        (partial(OwnSGD, lr=0.1, momentum=0.9), False),
        (partial(Promised, lr=0.1, momentum=0.9), True),
        (Trusting, False),
        (Declared, True),
        (_line_search, False),
        (torch.optim.Adafactor, False),
        (torch.optim.Muon, False),
    ],
)
def test_what_is_element_wise_is_known_or_promised(make: Callable[[Any], Optimizer], expected: bool) -> None:
    optimizer = make([nn.Parameter(torch.ones(3, 4))])
    assert (not whole_table_reason(type(optimizer))) is expected


def _two_backwards_under_way(rank: int, world_size: int) -> str:
    plain = words_model()
    model = embrace_fx.compile(plain, strategy="alltoall")
    optimizer = Trusting(plain.parameters())
    losses = [model(*words_batch(step, rank)) for step in range(2)]
    losses[0].backward()
    with pytest.raises(RuntimeError, match=r"must be whole.*Trusting does not promise") as told:
        optimizer.step()
    losses[1].backward()
    adam = Adam(plain.parameters())
    adam.step()  # training can continue with another optimizer
    return str(told.value)


def test_a_step_that_comes_too_early_to_put_tables_together_is_refused_on_every_rank() -> None:
    assert len(set(run_ranks(2, _two_backwards_under_way))) == 1
