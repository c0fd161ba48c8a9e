"""Loops beside DDP: what a loop finds on a compiled model, and where it ends, is what it finds on DDP of its like."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import embrace_fx
from tests.support.parts import differs
from tests.support.ranks import run_ranks
from tests.support.scenario import compiled_once

Case = tuple[Callable[[], nn.Module], Callable[[Any, int], Any]]
"""Makes the model; runs (the wrapped model, rank), and returns what it has found."""


def train(model: Any, batches: Iterable[Any], make: Callable[[Any], Optimizer]) -> list[Tensor]:
    """Takes a step with each batch, with an optimizer that is made first. Returns the losses."""
    return take_steps(model, make(model.parameters()), batches)


def take_steps(model: Any, optimizer: Any, batches: Iterable[Any]) -> list[Tensor]:
    """Takes a step with each batch. Returns the losses."""
    losses = []
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def ends(model: nn.Module) -> list[Tensor]:
    """Returns copies of a model's whole state, without names, because wrapping changes names. Collective."""
    return [value.clone() for value in embrace_fx.full_state_dict(model).values()]


def ids(step: int, rank: int, *shape: int, high: int = 50) -> Tensor:
    """Returns random ids for a batch, different on each rank and at each step."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(100 * step + rank))


def run(wrap: Callable[[nn.Module], Any], case: Case, rank: int, says: str = "") -> list[Any]:
    """Runs a loop from the beginning; returns what it has found, and the end of its model, whose report says so."""
    torch.manual_seed(0)
    make, loop = case
    model = wrap(make())
    found = loop(model, rank)
    assert not says or not isinstance(model, embrace_fx.CompiledModel) or says in model.report()
    return [found, ends(model)]


def _apart(rank: int, ranks: int, where: tuple[str, str], names: Iterable[str], of: tuple[Any, ...]) -> dict[str, str]:
    cases: Mapping[str, Case] = getattr(importlib.import_module(where[0]), where[1])
    ddp, options, once, dtype, says, rtol = of
    torch.set_default_dtype(dtype)
    theirs = partial(DistributedDataParallel, **ddp)
    ours = compiled_once(**options) if once else partial(embrace_fx.compile, **options)
    found = {}
    for name in names or cases:
        expected = run(theirs, cases[name], rank)
        if wrong := differs(run(ours, cases[name], rank, says), expected, rtol):
            found[name] = wrong
    return found


def check(
    where: str,
    *names: str,
    cases: str = "CASES",
    ranks: int = 2,
    ddp: Mapping[str, Any] | None = None,
    once: bool = False,
    dtype: torch.dtype = torch.float32,
    says: str = "",
    rtol: float = 1e-6,
    **options: Any,
) -> None:
    """Fails where a case ends elsewhere than under DDP.

    Args:
        where: the module that has `cases`; of these, `names`, or all.
        once: all cases have one kind of model, which is compiled once.
        dtype: the default one.
        says: a part of the compiled model's report.
        options: of `compile`.
    """
    __tracebackhide__ = True
    for wrong in run_ranks(ranks, _apart, (where, cases), names, (dict(ddp or {}), options, once, dtype, says, rtol)):
        assert not wrong
