"""Closures of optimizers: an optimizer that decides by the loss gets its mean over ranks, while the caller gets this
rank's own.

optimizer.step(closure)      inside LBFGS    float(closure()) is the mean, the same on all ranks
                             afterwards      what the step returns is this rank's own loss, as under DDP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.ranks.communicator import Communicator


def find_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """Returns the closure among the arguments of `Optimizer.step`, or None."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of `Optimizer.step` with the closure replaced."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), dict(kwargs)
    return args, {**kwargs, "closure": closure}


class _LossNumber(float):
    """A loss as a Python number. `float(loss)` is the mean over ranks while an optimizer steps, and this rank's own
    loss afterwards.
    """

    mean: float | None = None

    def __float__(self) -> float:
        return float.__float__(self) if self.mean is None else self.mean

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float.__float__(self),)


class MeanLoss:
    """A closure for an optimizer's step that returns the mean of the loss over ranks. Each call is collective.

    Args:
        closure: the user's closure, which computes the loss of this rank's batch and its gradients.
    """

    def __init__(self, closure: Callable[[], Any], communicator: Communicator) -> None:
        self._closure, self._communicator = closure, communicator
        self._restores: list[Callable[[], object]] = []  # each gives one loss this rank's own value back

    def __call__(self) -> Any:
        loss = self._closure()
        ranks = self._communicator.world_size
        if ranks == 1 or not isinstance(loss, Tensor | int | float):
            return loss
        total = torch.as_tensor(loss, dtype=None if isinstance(loss, Tensor) else torch.float64).detach().clone()
        mean = self._communicator.reduce_scalar(total, dist.ReduceOp.SUM) / ranks
        if isinstance(loss, Tensor):
            self._restores.append(partial(mean.copy_, loss.detach()))
            return mean
        number = _LossNumber(loss)
        number.mean = mean.item()
        self._restores.append(partial(setattr, number, "mean", None))
        return number

    def restore(self) -> None:
        """Replaces the means, in the losses that were returned to the optimizer, by this rank's own losses."""
        for restore in self._restores:
            restore()
        self._restores.clear()
