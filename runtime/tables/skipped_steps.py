"""Computes many steps without a gradient at once, so that rows need not take them one by one.

Contract
    A row that has rested takes all steps it has skipped at once, when it is read next: its values and its state are
    then the optimizer's own, up to rounding. What the steps of a history have in common for all rows is kept as
    tensors of one number per step, in float64.

Forms
    linear    SGD with momentum or weight decay, RMSprop without weight decay: a step is a 2 x 2 matrix on a weight and
              its momentum, and a factor of the averages. Steps in a row are one matrix.
    decaying  Adam and AdamW without a weight decay in the gradient: averages fade by their betas, weights by a factor,
              and by the sum of what is left of the momentum. That sum ends where the rest of it is below half of a
              weight's last bit.
    Others (Adam with weight decay in the gradient, Adagrad with weight decay, NAdam, RAdam, Adamax, Adadelta, Rprop,
    ASGD) depend on a row's own weights at every step: their tables are swept.

Shape legend: V' x d this rank's part of a table; K rows; T steps of the history.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from embrace_fx.runtime.kernels.decay import COLUMNS, Averages, Moments, TakenSteps, decay_rows
from embrace_fx.runtime.tables.own_step import by_options

MOST_STEPS = 4096
"""Of a history: then all rows take what they have skipped, and it begins anew."""


class SkippedSteps(ABC):
    """The steps of a history.

    Args:
        device: the table's.

    Attributes:
        count: how many steps it has.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = 0
        self._device = device

    @abstractmethod
    def fits(self, options: Mapping[str, Any]) -> bool:
        """Whether a step under these options can be another one of this history."""

    @abstractmethod
    def note(self, options: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Adds a step; the first one of a table whose state is as before it."""

    @abstractmethod
    def take(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None:
        """Has rows take all steps of the history that they have not taken, in place.

        Args:
            ids: (K,) rows; some may be the same.
            taken: (V',) integers, written: how many steps each row has taken; more than there are: nothing is done.
        """

    @abstractmethod
    def end(self) -> None:
        """Gives back memory for further steps: there are none."""


_READ = ("momentum", "dampening", "weight_decay", "eps", "alpha")
"""Options that a step reads on the host, besides lr and betas."""


def form_of(
    optimizer: Optimizer, options: Mapping[str, Any], state: Mapping[str, Any], dtype: torch.dtype
) -> type[SkippedSteps] | None:
    """Finds the form in which an optimizer's steps are skipped; None: they cannot be, or there is no state yet."""
    found = skipping(type(optimizer), options, dtype)
    if found is None:
        return None
    form, names = found
    for name in names:
        if not isinstance(state.get(name), Tensor):
            return None
    return form


Skipping = tuple[type[SkippedSteps], list[str]]
"""The form in which steps are skipped, and the state that it takes."""


@by_options
def skipping(kind: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype) -> Skipping | None:
    """Finds how a class's steps are skipped; None: they cannot be."""
    if dtype not in (torch.float32, torch.float64) or options.get("differentiable") or options.get("capturable"):
        return None
    if _tensors_among(options, _READ) or getattr(options["lr"], "requires_grad", False):
        return None
    if kind in (Adam, AdamW):
        greatest = ["max_exp_avg_sq"] * options["amsgrad"]
        return (Decaying, ["step", "exp_avg", "exp_avg_sq", *greatest]) if _decays(options) else None
    if kind is SGD:
        momentum = options["momentum"] != 0
        return None if momentum and options["dampening"] != 0 else (Linear, ["momentum_buffer"] * momentum)
    if kind is RMSprop and options["weight_decay"] == 0:
        momentum, centered = options["momentum"] > 0, options["centered"]
        return Linear, ["square_avg", *(["grad_avg"] * centered), *(["momentum_buffer"] * momentum)]
    return None


def _tensors_among(values: Mapping[str, Any], names: Iterable[str]) -> int:
    return sum([isinstance(values.get(name), Tensor) for name in names])


def _decays(options: Mapping[str, Any]) -> bool:
    """Whether the momentum of an Adam without gradients dies away, faster than what it is divided by."""
    beta1, beta2 = options["betas"]
    if isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
        return False
    if not (0 < beta1 < 1 and 0 < beta2 < 1 and beta1 < 0.99 * math.sqrt(beta2) and options["eps"] > 0):
        return False
    if not float(options["lr"]) >= 0:
        return False
    return options["weight_decay"] == 0 or (options["decoupled_weight_decay"] and 0 < _shrink(options) <= 1)


def _shrink(options: Mapping[str, Any]) -> float:
    return 1.0 - float(options["lr"]) * float(options["weight_decay"])


class Decaying(SkippedSteps):
    """Skipped steps of Adam and AdamW.

    After step t of the history, of a row whose m, v, w are as after step s (betas b1, b2, decay lambda, e the number of
    steps that the optimizer counts):

        m = m_s B1[t] / B1[s]    v = v_s B2[t] / B2[s]    w = w_s S[t] / S[s] - sum over s < j <= t of
            S[t] / S[j] * a[j] * m_j / (sqrt(v_j) * c[j] + eps[j])
        a = lr / (1 - b1^e)      c = 1 / sqrt(1 - b2^e)   S[j] = S[j - 1] * (1 - lr lambda)   B[j] = B[j - 1] * b
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._coefficients: Tensor | None = None
        self._moments: Moments | None = None
        self._counted = 0  # what the optimizer counts
        self._logs: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._bounds = (0.0, math.inf, 0.0)  # largest size, least eps, largest ratio
        self._amsgrad: bool | None = None

    def fits(self, options: Mapping[str, Any]) -> bool:
        return self._amsgrad in (None, options["amsgrad"])

    def note(self, options: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        if self._coefficients is None:
            self._coefficients = torch.zeros((MOST_STEPS + 1, COLUMNS), dtype=torch.float64, device=self._device)
            self._counted = round(float(state["step"]))
            self._amsgrad = options["amsgrad"]
            if self._device.type == "cpu":
                self._moments = Moments(MOST_STEPS, options["eps"], fades=not options["amsgrad"])
        self.count += 1
        self._counted += 1
        (beta1, beta2), lr, eps = options["betas"], float(options["lr"]), options["eps"]
        fading = (beta1, beta2, _shrink(options))
        self._logs = tuple([log + math.log(factor) for log, factor in zip(self._logs, fading, strict=True)])
        size = lr / (1 - beta1**self._counted)
        correction = (1 - beta2**self._counted) ** -0.5
        self._coefficients[self.count] = torch.tensor(
            [*self._logs, size, correction, eps], dtype=torch.float64, device="cpu"
        )
        if self._moments is not None and self._moments.eps == eps:
            self._moments.add(self._counted, size, correction, fading)
        else:
            self._moments = None
        largest, least, ratio = self._bounds
        self._bounds = (max(largest, size), min(least, eps), max(ratio, beta1 / math.sqrt(beta2)))

    def take(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None:
        assert self._coefficients is not None
        greatest = state["max_exp_avg_sq"] if self._amsgrad else None
        averages = Averages(state["exp_avg"], state["exp_avg_sq"], greatest)
        decay_rows(
            local, averages, ids, taken, TakenSteps(self._coefficients, self.count, *self._bounds, self._moments)
        )

    def end(self) -> None:
        if self._coefficients is not None:
            self._coefficients = self._coefficients[: self.count + 1].clone()
        if self._moments is not None:
            self._moments.end()


class Linear(SkippedSteps):
    """Skipped steps of SGD and RMSprop.

    For every step s of the history, the map that leads from there to its end: w = a w_s + b u_s, u = c w_s + d u_s of a
    weight and its momentum, and the factor of averages. A step more is multiplied to all of them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._maps: Tensor | None = None  # (T + 1, 5)

    def fits(self, options: Mapping[str, Any]) -> bool:
        return True

    def note(self, options: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        if self._maps is None:
            self._maps = torch.zeros((MOST_STEPS + 1, 5), dtype=torch.float64, device=self._device)
            self._maps[0] = self._maps.new_tensor(_IDENTITY)
        (p, q, r, s), factor = _map_of(options)
        before = self._maps[: self.count + 1]
        a, b, c, d = (column.clone() for column in before[:, :4].unbind(1))
        before.copy_(
            torch.stack([p * a + q * c, p * b + q * d, r * a + s * c, r * b + s * d, factor * before[:, 4]], 1)
        )
        self.count += 1
        self._maps[self.count] = self._maps.new_tensor(_IDENTITY)

    def take(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None:
        assert self._maps is not None
        rested = taken.index_select(0, ids)
        if not local.is_cuda:  # where it costs nothing to know which
            behind = rested < self.count
            ids, rested = ids[behind], rested[behind]
        maps = self._maps.index_select(0, rested.clamp(max=self.count))
        a, b, c, d, factor = (column.unsqueeze(1) for column in maps.unbind(1))
        weight, momentum = local.index_select(0, ids), state.get("momentum_buffer")
        if momentum is None:
            local.index_copy_(0, ids, (a * weight).to(local.dtype))
        else:
            velocity = momentum.index_select(0, ids)
            # In float64, which the maps are of: what a decayed weight and its momentum have left may nearly cancel.
            local.index_copy_(0, ids, (a * weight + b * velocity).to(local.dtype))
            momentum.index_copy_(0, ids, (c * weight + d * velocity).to(local.dtype))
        for name in ("square_avg", "grad_avg"):
            if name in state:
                average = state[name].index_select(0, ids)
                state[name].index_copy_(0, ids, (factor * average).to(local.dtype))
        taken.index_copy_(0, ids, rested.clamp(min=self.count))

    def end(self) -> None:
        if self._maps is not None:
            self._maps = self._maps[: self.count + 1].clone()


_IDENTITY = (1.0, 0.0, 0.0, 1.0, 1.0)


def _map_of(options: Mapping[str, Any]) -> tuple[tuple[float, float, float, float], float]:
    """One step without a gradient on a weight and its momentum, and on averages."""
    lr, momentum = float(options["lr"]), options["momentum"]
    if "alpha" in options:  # RMSprop
        return (1.0, -lr * momentum, 0.0, momentum if momentum > 0 else 1.0), options["alpha"]
    decay = options["weight_decay"]
    if momentum == 0:
        return (1 - lr * decay, 0.0, 0.0, 1.0), 1.0
    if options["nesterov"]:
        return (1 - lr * decay * (1 + momentum), -lr * momentum**2, decay, momentum), 1.0
    return (1 - lr * decay, -lr * momentum, decay, momentum), 1.0
