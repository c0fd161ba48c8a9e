"""Row-wise Adagrad, common for recommenders: one accumulator per row of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

MEAN_SQUARES = "mean_squares"
"""Option of one step: (K,) the mean squared gradient of each row, where the gradient has only some of the columns."""
NOT_ON_A_GRID = "RowWiseAdagrad supports shards by columns, not on a grid"


class RowWiseAdagrad(Optimizer):
    """Adagrad that accumulates one number for each row of a table: the mean squared gradient of the row's elements.

        sum[r] += mean(gradient[r]^2)    weight[r] -= lr * gradient[r] / (sqrt(sum[r]) + eps)

    A table of V x D has V numbers of state instead of V x D. Rows without a gradient are unchanged. 1D parameters have
    one number per element, as with Adagrad. For a sharded table the mean is over the whole row: ranks sum the squares
    of their columns. Without weight decay, the exact row-wise Adagrad of FBGEMM and TorchRec is the same optimizer.

    Args:
        params: parameters, or param groups.
        lr: the learning rate.
        eps: added to the square root.
        initial_accumulator_value: the initial value of every sum.

    Raises:
        ValueError: a negative option.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        options = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        for name, value in options.items():
            if not value >= 0:
                raise ValueError(f"RowWiseAdagrad: {name} is {value}. Pass zero or a positive number.")
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Performs one optimizer step. Returns the closure's loss, or None without a closure.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                if gradient.is_sparse:
                    raise RuntimeError(
                        "RowWiseAdagrad does not support sparse gradients. Create the table with sparse=False: a "
                        "compiled model sends only the rows that have a gradient in either case."
                    )
                state = self.state[parameter]
                if not state:
                    state["sum"] = new_sums(parameter, group)
                dims = tuple(range(1, parameter.dim()))
                squares = group.get(MEAN_SQUARES)
                if squares is None:
                    squares = gradient.square().mean(dims) if dims else gradient.square()
                state["sum"].add_(squares)
                root = state["sum"].sqrt().add_(group["eps"])
                parameter.sub_(group["lr"] * gradient / root.view(*root.shape, *(1 for _ in dims)))
        return loss


def new_sums(parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Returns the initial optimizer state of a parameter: a tensor with one number per row.

    Args:
        group: the parameter's param group, with the optimizer's options.
    """
    return torch.full(
        parameter.shape[:1], group["initial_accumulator_value"], dtype=parameter.dtype, device=parameter.device
    )
