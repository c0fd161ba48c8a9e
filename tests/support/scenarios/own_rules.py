"""Optimizers that are not torch's: in shards where they promise to be element-wise, else of whole tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from tests.support.scenario import Training, scenario


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
        """Writes values that depend on all gradients into the group."""

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        """Returns the direction of a parameter's step."""
        return gradient


class Lion(Ruled):
    """Steps by the sign of an average (arXiv 2302.06675). The class does not declare itself element-wise."""

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
        found = average.mul(0.9).add(gradient, alpha=0.1).sign()
        average.lerp_(gradient, 0.01)
        return 0.1 * found


class PromisedLion(Lion):
    element_wise = True


class Counting(Ruled):
    """Uses a factor that depends on the group's step count, as schedule-free optimizers do."""

    element_wise = True

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        group["d"] = 1.0 / (1 + group["count"])
        return group["d"] * gradient


class Growing(Ruled):
    """Computes a step size from all gradients of a group (Prodigy, D-Adaptation)."""

    def look(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        group["d"] = max(group["d"], *(1.0 + float(g.abs().sum()) for g in gradients))

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        return group["d"] * gradient


class Clipping(Ruled):
    """Clips the norm of all gradients inside of the optimizer."""

    def look(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        group["d"] = min(1.0, 0.05 / norm)

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        return group["d"] * gradient


class Skipping(Ruled):
    """Skips steps whose gradient norm has increased."""

    def look(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        norm = float(torch.stack([g.norm() for g in gradients]).norm())
        group["skips"] = norm > group.get("norm", norm)
        group["norm"] = norm

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        return torch.zeros_like(gradient) if group["skips"] else gradient


class Layered(Ruled):
    """Scales each tensor's step by a ratio of norms (LAMB, arXiv 1904.00962)."""

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        return gradient * parameter.norm() / gradient.norm().clamp(min=1e-6)


class Wary(AdamW):
    """A subclass of AdamW that clips each row of the gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.dim() == 2:
                    parameter.grad.div_(parameter.grad.norm(dim=1, keepdim=True).clamp(min=1e-2))
        return super().step(closure)


class Sharp(Ruled):
    """Adds a step uphill to each gradient, as SAM does (arXiv 2010.01412)."""

    def direction(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Any:
        return gradient + 0.05 * gradient / (gradient.norm() + 1e-12)


def _steps(name: str, make: Callable[..., Optimizer], *, sharded: bool = False) -> None:
    def run(training: Training) -> None:
        for step, batch in enumerate(training.batches()):
            (training.model(*batch) * (20 if step == 3 else 1)).backward()
            training.step()
        if training.is_compiled and training.model.plan.sharded:
            assert sharded, training.model.plan

    run.__name__ = f"own rule {name}"
    scenario(optimizer=make, fresh=True)(run)


for _kind in (Lion, Growing, Clipping, Skipping, Layered, Sharp, Wary, torch.optim.Adafactor):
    _steps(_kind.__name__, _kind)
for _promised in (PromisedLion, Counting):
    _steps(_promised.__name__, _promised, sharded=True)
_steps("of groups", lambda params: Counting([{"params": params, "lr": 0.02}], lr=0.1), sharded=True)
