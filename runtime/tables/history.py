"""Records the optimizer steps that rows without a gradient have deferred, to apply them when the rows are next read.

Contract
    A row applies its deferred steps, all at once, when it is next read. Its values and state then equal those of the
    optimizer, up to rounding. All rows apply them before a checkpoint, before parameters or state are handed out, and
    before a step that cannot be deferred.
    One step calls `begin`. For rows with gradients it then calls `apply_deferred`, the update and `record_applied`. At
    its end it calls `record`.
    A joined table has a history, and so has each of its tables. One kind is closed before the other is opened.

Forms of steps. Values that the steps share for all rows are float64 tensors with one number per step.
    linear    SGD with momentum or weight decay, RMSprop without weight decay. A step is a 2 x 2 matrix on a weight and
              its momentum, and a factor on the averages. Consecutive steps multiply to one matrix.
    decaying  Adam and AdamW without L2 weight decay. The averages decay by their betas, the weights by a factor and by
              the sum of the remaining momentum terms, which stops below half of a weight's last bit.
    Others (Adam with L2 weight decay, Adagrad with weight decay, NAdam, RAdam, Adamax, Adadelta, Rprop, ASGD) need the
    row's own weights at every step, so their steps update all rows.

Shape legend: V' x d this rank's part of the table; K rows; T deferred steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from embrace_fx.runtime.kernels.decay import COLUMNS, Averages, Moments, TakenSteps, decay_rows
from embrace_fx.runtime.tables.own_step import cached_by_options

if TYPE_CHECKING:
    from embrace_fx.runtime.tables.row_store import RowStore

MOST_STEPS = 4096
"""Steps in a history before all rows apply them and a new history begins."""
ROWS_AT_ONCE = 1 << 16
"""Rows per block when all rows apply their deferred steps."""


class History:
    """The deferred optimizer steps of a table.

    Args:
        store: the rows and their optimizer state.
        members: for a joined table, maps the first row of each of its tables to that table's history.

    Attributes:
        open: the steps that some rows have not applied yet, or None if there are none.
    """

    def __init__(self, store: RowStore, members: Mapping[int, History] | None = None) -> None:
        self.open: SkippedSteps | None = None
        self._store = store
        self._members = tuple(members.values()) if members else ()
        self._space: History | None = None
        self._with = self, *self._members  # histories that must be closed together
        self._first = 0  # the table's first row in the joined table
        self._before = 0  # the number of steps before the first one in `self.open`
        self._taken: Tensor | None = None
        for first, each in (members or {}).items():
            each.close()
            each._space, each._with, each._first = self, (self, each), first

    @property
    def has_deferred(self) -> bool:
        """Whether any row may have deferred steps."""
        return any(map(_OPEN, self._with))

    def begin(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        """Begins an optimizer step that rows may defer. Call it before the step updates any row."""
        local, known = self._store.local, self.open
        form = deferred_steps_class(type(optimizer), options, local.dtype)
        assert form is not None
        if known is None or not (isinstance(known, form) and known.fits(options)):
            self.close()
            self.open = form(local.device)
        if self._taken is None:
            self._taken = torch.zeros(len(local), dtype=torch.int32, device=local.device)

    def record_applied(self, places: Tensor) -> None:
        """Records that the rows at `places` (K,) have applied the current step."""
        assert self.open is not None
        assert self._taken is not None
        self._taken.index_fill_(0, places, self._before + self.open.count + 1)

    def record(self, options: Mapping[str, Any]) -> None:
        """Records the current step as deferred for all other rows. Call it before the step changes the state."""
        assert self.open is not None
        self.open.record(options, {} if self.open.count else self._store.state)
        if self.open.count == MOST_STEPS:
            self.close()

    def apply_deferred(self, places: Tensor) -> None:
        """Applies the deferred steps of the rows at `places` (K,). Call it before the rows are read."""
        if self.open is not None:
            self.apply_open(places, self._store.local, self._store.state)
        elif self._space is not None and self._space.open is not None:
            self._space.apply_deferred(places + self._first if self._first else places)
        elif self._members and self.has_deferred:
            for each, own in self._split_by_member(places):
                each.apply_deferred(own)

    def _split_by_member(self, places: Tensor) -> Iterator[tuple[History, Tensor]]:
        """Yields the history of each table, and its share of `places` (K,) as its own row numbers."""
        firsts = torch.tensor([each._first for each in self._members[1:]], device=places.device)
        of = torch.bucketize(places, firsts, right=True)
        for k, each in enumerate(self._members):
            yield each, places[of == k] - each._first

    def apply_open(self, places: Tensor, local: Tensor, state: Mapping[str, Any]) -> None:
        """Applies the deferred steps to the rows at `places` (K,) of the weights (V', d), in place."""
        assert self.open is not None
        assert self._taken is not None
        if self.open.count:
            self.open.apply_to(local, state, places, self._taken)

    def close(self) -> None:
        """Applies all deferred steps to all rows, and starts an empty history. Do not call it during a step."""
        for each in self._with:
            if each.open is not None:
                each._close()
            each.open = None

    def _close(self) -> None:
        """Applies the deferred steps to all rows that have not applied them yet."""
        assert self.open is not None
        assert self._taken is not None
        if self.open.count:
            local, state = self._store.local, self._store.state
            for places in torch.arange(len(local), device=local.device).split(ROWS_AT_ONCE):
                self.apply_open(places, local, state)
        self._taken.zero_()


_OPEN = attrgetter("open")


# -- the forms of steps ------------------------------------------------------------------------------------------------


class SkippedSteps(ABC):
    """Several optimizer steps without a gradient, stored so that all of them can be applied to a row at once.

    Attributes:
        count: the number of steps.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = 0
        self._device = device

    def fits(self, options: Mapping[str, Any]) -> bool:
        """Returns whether an optimizer step with these options can be added."""
        return True

    @abstractmethod
    def record(self, options: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Adds one step. `state` is the optimizer state before the first step; later steps ignore it."""

    @abstractmethod
    def apply_to(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None:
        """Applies the steps to the rows `ids` (K,), with possible duplicates, of the weights `local` (V', d), in place.

        Args:
            taken: (V',) integers, updated in place: the number of steps that each row has applied. Rows with more than
                `count` do not change.
        """

    @abstractmethod
    def end(self) -> None:
        """Frees the memory reserved for further steps."""


_READ = ("momentum", "dampening", "weight_decay", "eps", "alpha")
"""Options that a step reads on the host, besides lr and betas."""


@cached_by_options
def deferred_steps_class(
    kind: type[Optimizer], options: Mapping[str, Any], dtype: torch.dtype
) -> type[SkippedSteps] | None:
    """Returns the class for deferred steps of an optimizer with these options, or None if it cannot defer them."""
    if dtype not in (torch.float32, torch.float64) or options.get("differentiable") or options.get("capturable"):
        return None
    if any(isinstance(options.get(name), Tensor) for name in _READ) or getattr(options["lr"], "requires_grad", False):
        return None
    if kind in (Adam, AdamW):
        return DeferredAdam if _can_defer_adam(options) else None
    if kind is SGD:
        return None if options["momentum"] != 0 and options["dampening"] != 0 else DeferredSGD
    return DeferredSGD if kind is RMSprop and options["weight_decay"] == 0 else None


def _can_defer_adam(options: Mapping[str, Any]) -> bool:
    """Returns whether, without gradients, Adam's momentum decays faster than its denominator."""
    beta1, beta2 = options["betas"]
    if isinstance(beta1, Tensor) or isinstance(beta2, Tensor):
        return False
    if not (0 < beta1 < 1 and 0 < beta2 < 1 and beta1 < 0.99 * math.sqrt(beta2) and options["eps"] > 0):
        return False
    if not float(options["lr"]) >= 0:
        return False
    return options["weight_decay"] == 0 or (options["decoupled_weight_decay"] and 0 < _decay_factor(options) <= 1)


def _decay_factor(options: Mapping[str, Any]) -> float:
    """Returns the factor by which one step's decoupled weight decay multiplies weights."""
    return 1.0 - float(options["lr"]) * float(options["weight_decay"])


class DeferredAdam(SkippedSteps):
    """Deferred steps of Adam and AdamW, as running products and sums of their coefficients.

    A row that has applied s steps of the history has moments m_s and v_s and weight w_s. After step t, its values are
    as follows, where b1 and b2 are the betas, lambda is the weight decay and e is the optimizer's step count:

        m = m_s B1[t] / B1[s]    v = v_s B2[t] / B2[s]    w = w_s S[t] / S[s] - sum over s < j <= t of
            S[t] / S[j] * a[j] * m_j / (sqrt(v_j) * c[j] + eps[j])
        a = lr / (1 - b1^e)      c = 1 / sqrt(1 - b2^e)   S[j] = S[j - 1] * (1 - lr lambda)   B[j] = B[j - 1] * b
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._coefficients: Tensor | None = None
        self._moments: Moments | None = None
        self._counted = 0  # the optimizer's step count
        self._logs: tuple[float, ...] = (0.0, 0.0, 0.0)
        self._bounds = (0.0, math.inf, 0.0)  # largest step size, smallest eps, largest ratio
        self._amsgrad: bool | None = None

    def fits(self, options: Mapping[str, Any]) -> bool:
        return self._amsgrad in (None, options["amsgrad"])

    def record(self, options: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        if self._coefficients is None:
            self._coefficients = torch.zeros((MOST_STEPS + 1, COLUMNS), dtype=torch.float64, device=self._device)
            self._counted = round(float(state["step"]))
            self._amsgrad = options["amsgrad"]
            if self._device.type == "cpu":
                self._moments = Moments(MOST_STEPS, options["eps"], fades=not options["amsgrad"])
        self.count += 1
        self._counted += 1
        (beta1, beta2), lr, eps = options["betas"], float(options["lr"]), options["eps"]
        fading = (beta1, beta2, _decay_factor(options))
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

    def apply_to(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None:
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


class DeferredSGD(SkippedSteps):
    """Deferred steps of SGD and RMSprop, as linear maps of a weight and its momentum.

    For each step s, stores the map from the values after step s to the values after the last step. For a weight w and
    its momentum u, the map is w = a w_s + b u_s and u = c w_s + d u_s. Also stores the factor by which moving averages
    decay after step s. A new step multiplies every map.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        # (T + 1, 5): for each step, the combined effect of all later steps: the 4 entries of the 2 x 2 matrix that they
        # apply to (weight, momentum), then the factor by which they decay the moving averages.
        self._maps: Tensor | None = None

    def record(self, options: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Adds one step, by multiplying the maps of all earlier steps by its own."""
        if self._maps is None:
            self._maps = torch.zeros((MOST_STEPS + 1, 5), dtype=torch.float64, device=self._device)
            self._maps[0] = self._maps.new_tensor(_IDENTITY)
        (p, q, r, s), factor = _step_map(options)
        before = self._maps[: self.count + 1]
        a, b, c, d = (column.clone() for column in before[:, :4].unbind(1))
        before.copy_(
            torch.stack([p * a + q * c, p * b + q * d, r * a + s * c, r * b + s * d, factor * before[:, 4]], 1)
        )
        self.count += 1
        self._maps[self.count] = self._maps.new_tensor(_IDENTITY)

    def apply_to(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, taken: Tensor) -> None:
        assert self._maps is not None
        rested = taken.index_select(0, ids)
        if not local.is_cuda:  # a selection by mask synchronizes with a device, but costs nothing on the CPU
            behind = rested < self.count
            ids, rested = ids[behind], rested[behind]
        maps = self._maps.index_select(0, rested.clamp(max=self.count))
        a, b, c, d, factor = (column.unsqueeze(1) for column in maps.unbind(1))
        weight, momentum = local.index_select(0, ids), state.get("momentum_buffer")
        if momentum is None:
            local.index_copy_(0, ids, (a * weight).to(local.dtype))
        else:
            velocity = momentum.index_select(0, ids)
            # Compute in float64, like the maps, because a decayed weight and its momentum may nearly cancel.
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


def _step_map(options: Mapping[str, Any]) -> tuple[tuple[float, float, float, float], float]:
    """Returns ((a, b, c, d), factor) of one step without a gradient: a weight w and its momentum u become a w + b u and
    c w + d u, and the factor multiplies moving averages.
    """
    lr, momentum = float(options["lr"]), options["momentum"]
    if "alpha" in options:  # only RMSprop has the option alpha
        return (1.0, -lr * momentum, 0.0, momentum if momentum > 0 else 1.0), options["alpha"]
    decay = options["weight_decay"]
    if momentum == 0:
        return (1 - lr * decay, 0.0, 0.0, 1.0), 1.0
    if options["nesterov"]:
        return (1 - lr * decay * (1 + momentum), -lr * momentum**2, decay, momentum), 1.0
    return (1 - lr * decay, -lr * momentum, decay, momentum), 1.0
