"""Optimizers that are not torch's: equal to DDP's, in shards where they promise to be element-wise, else whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.scenario import Training
from tests.support.sides import DTYPE
from tests.support.training import SEED, whole_parameters


class Ruled(Optimizer):
    """Steps each gradient by a rule of a group that it may write, and of state.

    Args:
        options: of the groups; `d`, which the rule may write.
    """

    def __init__(self, params: Any, lr: float = 0.05, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0, "count": 0, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            with_gradient = [p for p in group["params"] if p.grad is not None]
            self.look(group, [p.grad for p in with_gradient])
            for parameter in with_gradient:
                parameter.sub_(group["lr"] * self.direction(group, parameter, parameter.grad))
            group["count"] += 1

    def look(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        """Writes what all gradients tell into the group."""

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        """The direction of a step."""
        return gradient


class Lion(Ruled):
    """Signs of an average (arXiv 2302.06675), which nobody has promised anything of."""

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        found = average.mul(0.9).add(gradient, alpha=0.1).sign()
        average.lerp_(gradient, 0.01)
        return 0.1 * found


class PromisedLion(Lion):
    element_wise = True


class Counting(Ruled):
    """Decays by a number of steps that the group counts, as schedule-free optimizers do."""

    element_wise = True

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        group["d"] = 1.0 / (1 + group["count"])
        return group["d"] * gradient


class Growing(Ruled):
    """A step size of its own in the group, of all gradients (Prodigy, D-Adaptation)."""

    def look(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        group["d"] = max(group["d"], *(1.0 + float(g.abs().sum()) for g in gradients))

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        return group["d"] * gradient


class Clipping(Ruled):
    """`max_grad_norm` inside of the optimizer."""

    def look(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        group["d"] = min(1.0, 0.05 / norm)

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        return group["d"] * gradient


class Skipping(Ruled):
    """Leaves out steps whose gradients are larger than they were."""

    def look(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        group["skips"] = norm > group.get("norm", norm)
        group["norm"] = norm

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        return torch.zeros_like(gradient) if group["skips"] else gradient


class Layered(Ruled):
    """A ratio of norms for each tensor (LAMB, arXiv 1904.00962)."""

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        return gradient * parameter.norm() / gradient.norm().clamp(min=1e-6)


class Wary(AdamW):
    """Derived from one of torch's; clips each row."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.dim() == 2:
                    parameter.grad.div_(parameter.grad.norm(dim=1, keepdim=True).clamp(min=1e-2))
        return super().step(closure)


class Sharp(Ruled):
    """Steps uphill first (SAM, arXiv 2010.01412), by the gradients that it has."""

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        return gradient + 0.05 * gradient / (gradient.norm() + 1e-12)


Make = Callable[[Any], Optimizer]
WHOLE = {kind.__name__: kind for kind in (Lion, Growing, Clipping, Skipping, Layered, Sharp, Wary)}
PROMISED = {kind.__name__: kind for kind in (PromisedLion, Counting)}
MAKERS: dict[str, Make] = {
    **WHOLE,
    **PROMISED,
    "Adafactor": torch.optim.Adafactor,
    "a group of each kind": lambda params: Counting([{"params": params, "lr": 0.02}], lr=0.1),
}


def _train(rank: int, training: Training) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    for step, batch in enumerate(training.batches(6)):
        (training.model(*batch) * (20 if step == 3 else 1)).backward()
        training.step()
    groups = [{key: v for key, v in group.items() if key != "params"} for group in training.optimizer.param_groups]
    return whole_parameters(training.module), groups


def _both(rank: int, world_size: int) -> dict[str, Any]:
    torch.set_default_dtype(DTYPE)
    found = {}
    for name, make in MAKERS.items():
        torch.manual_seed(SEED)
        compiled = Training(partial(embrace_fx.compile, strategy="alltoall"), make, is_compiled=True)
        ours = _train(rank, compiled)
        torch.manual_seed(SEED)
        theirs = _train(rank, Training(DistributedDataParallel, make, is_compiled=False))
        found[name] = ours, theirs, compiled.model.plan["words.weight"].strategy
    return found


def _check(ranks: int) -> None:
    for found in run_ranks(ranks, _both):
        for name, ((ended, groups), (expected, expected_groups), strategy) in found.items():
            assert_same(ended, expected, DTYPE)
            assert [sorted(group) for group in groups] == [sorted(group) for group in expected_groups]
            for key in ("lr", "d", "count", "norm", "skips"):
                told, expected_told = ([group.get(key, 0) for group in each] for each in (groups, expected_groups))
                assert told == pytest.approx(expected_told), name
            assert (strategy == "alltoall") is (name in PROMISED or name == "a group of each kind"), name


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rule_of_its_own_steps_as_under_ddp(ranks: int) -> None:
    _check(ranks)
