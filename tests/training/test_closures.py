"""`optimizer.step(closure)` trains as under DDP, and returns what the closure returned on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.scenario import compiled_once
from tests.support.scenarios.schemes import Words, ids_of

STEPS = 3


class Deciding(SGD):
    """Steps twice if the loss is large, on which all ranks must agree."""

    @torch.no_grad()
    def step(self, closure: Any, large: float) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        super().step()
        if float(loss) > large:
            super().step()
        return loss


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, 1e-2, eps=1e-3),
    "LBFGS": lambda parameters: LBFGS(parameters, max_iter=2),
    "Deciding": lambda parameters: Deciding(parameters, 0.1),
}
RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda loss: loss,
    "float": lambda loss: loss.item(),
    "pair": lambda loss: (loss.detach(), 2 * loss.item()),
    "dict": lambda loss: {"loss": loss.detach()},
    "None": lambda loss: None,
}
NO_NUMBERS = ("pair", "dict", "None")


def _calls(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    if isinstance(optimizer, Deciding):
        return optimizer.step(closure, 0.5)  # other arguments are passed on, too
    return optimizer.step(closure=closure)


def _trained(wrap: Callable[[Any], Any], rank: int, optimizer: str, returns: str) -> list[Any]:
    torch.manual_seed(0)
    model = wrap(Words().double())
    steps, log = OPTIMIZERS[optimizer](model.parameters()), list[Any]()
    for k in range(STEPS):

        def closure(k: int = k) -> Any:
            steps.zero_grad()
            loss = (model(ids_of(rank, k)) - 1).square().mean()
            loss.backward()
            return RETURNS[returns](loss)

        found = _calls(steps, closure)
        log.append(float(found) if isinstance(found, float) else found)
    return [*log, *embrace_fx.full_state_dict(model).values()]


def _combinations() -> Iterator[tuple[str, str]]:
    for optimizer in OPTIMIZERS:
        for returns in RETURNS:
            if optimizer == "AdamW" or returns not in NO_NUMBERS:  # other optimizers compare the returned values
                yield optimizer, returns


def _both(rank: int, world_size: int) -> dict[tuple[str, str], tuple[list[Any], list[Any]]]:
    SGD([torch.zeros(1)], 0.1)  # torch hooks a class's step when its first instance is created
    found, wraps = {}, {optimizer: compiled_once(strategy="alltoall") for optimizer in OPTIMIZERS}
    for each in _combinations():
        theirs = _trained(DistributedDataParallel, rank, *each)
        found[each] = _trained(wraps[each[0]], rank, *each), theirs
    return found


def test_a_step_returns_what_the_closure_returned_on_this_rank() -> None:
    everyone = run_ranks(2, _both)
    for found in everyone:
        for (optimizer, returns), (ours, theirs) in found.items():
            name = f"{optimizer}, {returns}"
            if optimizer == "AdamW":  # under DDP, other optimizers act on each rank's own loss
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)
            for own, other in zip(ours[:STEPS], theirs[:STEPS], strict=True):
                assert isinstance(own, type(other)), name
            torch.testing.assert_close(ours[0], theirs[0], rtol=1e-9, atol=1e-12, msg=name)  # parameters are equal
    for each, (ours, _) in everyone[0].items():
        torch.testing.assert_close(ours[STEPS:], everyone[1][each][0][STEPS:], msg=f"{each}: ranks differ")
