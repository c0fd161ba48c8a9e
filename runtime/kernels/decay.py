"""Applies to rows the Adam steps without a gradient that they have deferred (`embrace_fx.runtime.tables.history`).

The CPU kernel has two methods. The sum over a row's deferred steps is computed from a few moments, which all rows
share, if the error is below a weight's last bit (`_apply_together`); else it is computed term by term
(`_apply_in_order`).

Shape legend: V' x d this rank's part of a table; K rows; C steps of a block; T steps of the history.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from embrace_fx.runtime.kernels import gpu

LOG_BETA1, LOG_BETA2, LOG_SHRINK, SIZE, CORRECTION, EPS = range(6)
"""Columns of the coefficients (T + 1, 6): logarithms of products from the first step on, and of the step itself its
size, the bias correction of the root and eps. Row 0: before the first step."""
COLUMNS = 6

STEPS_PER_BLOCK = 8
_ELEMENTS = 1 << 19
"""Elements of a block of steps and rows, small enough to stay in cache."""


class Averages(NamedTuple):
    """Adam's running averages for a table's rows, (V', d) each.

    Attributes:
        first, second: the averages of the gradient and of its square.
        greatest: the maximum of `second` so far, which replaces `second` in the denominator with amsgrad. None without
            amsgrad.
    """

    first: Tensor
    second: Tensor
    greatest: Tensor | None


class TakenSteps(NamedTuple):
    """The latest optimizer steps of a table. Rows that had no gradient may not have applied all of them yet.

    The coefficients define each step. The bounds (`largest`, `least_eps` and `ratio`) show when further steps no longer
    change a weight.

    Attributes:
        coefficients: (T + 1, 6) float64. Row t has the coefficients after t steps; the constants `LOG_BETA1` to `EPS`
            of this module are the column indices.
        steps: the number of steps.
        largest: the largest step size.
        least_eps: the smallest eps of any step.
        ratio: the maximum ratio of consecutive updates without a gradient, beta1 / sqrt(beta2).
        moments: sums with which all steps can be applied at once, or None.
    """

    coefficients: Tensor
    steps: int
    largest: float
    least_eps: float
    ratio: float
    moments: Moments | None = None


class Moments:
    """Sums over deferred steps, with which all of these steps can be applied to a row at once.

    Without a gradient, a step of Adam subtracts a * m / (x + eps) from a weight. The momentum m and the root x of the
    second average, with bias correction, decay from step to step. Let z be the root at one of the steps, y = z / (z +
    eps), and x = z (1 - u) at each step:

        sum over steps of  a m / (x + eps)  =  m / (z + eps) * sum over n of  y^n * (sum over steps of  a f u^n)

    where f is the remaining fraction of m. Only y, z and m depend on the row: the inner sums are equal for all rows
    that have skipped the same steps. The series converges fast, because u is small while f is large: the root decays
    slowly, and z is the root at the mean step of the momentum's decay. After TERMS terms, the rest is at most m / (z +
    eps) * y^TERMS * (sum of a f |u|^TERMS / min(1, 1 - u)).

    Args:
        most: the maximum number of steps.
        eps: the optimizer's eps in all steps.
        fades: whether the root decays; with amsgrad only its bias correction changes.

    Attributes:
        sums: (TERMS + 1, T) float64: the sums of a f u^n for n below TERMS, and the bound of the terms left out.
        centre: (T,) float64: z divided by the root of the row's stored second average.
    """

    TERMS = 12

    def __init__(self, most: int, eps: float, *, fades: bool) -> None:
        self.eps, self._fades = eps, fades
        self._count, self._correction = 0, 1.0
        self.sums = torch.zeros(self.TERMS + 1, most, dtype=torch.float64, device="cpu")
        self.centre = torch.ones(most, dtype=torch.float64, device="cpu")
        self._faded = torch.ones(most, dtype=torch.float64, device="cpu")  # f: the remaining fraction of the momentum
        self._root = torch.ones(most, dtype=torch.float64, device="cpu")  # 1 - u, with u as in the class's docstring

    def add(self, counted: int, size: float, correction: float, fading: tuple[float, float, float]) -> None:
        """Adds one optimizer step to the sums.

        Args:
            counted: the optimizer's step count including this step.
            size: the step's size, the factor of the momentum in the update.
            correction: the bias correction by which the root of the second average is multiplied.
            fading: (beta1, beta2, factor by which weight decay multiplies weights).
        """
        beta1, beta2, shrink = fading
        fade = math.sqrt(beta2) if self._fades else 1.0
        before, self._count = self._count, self._count + 1
        mean = 1 / (1 - beta1)
        # The sums are exact for any centre. This one, at the mean step of the momentum's decay, keeps u small.
        self.centre[before] = fade**mean * (1 - beta2 ** (counted + mean - 1)) ** -0.5
        faded, root, sums = self._faded[: self._count], self._root[: self._count], self.sums[:, : self._count]
        if shrink != 1.0:
            sums *= shrink
        root *= fade * correction / self._correction
        root[before] = fade * correction / self.centre[before]
        self._correction = correction
        faded *= beta1
        factors = root.neg().add_(1.0).repeat(self.TERMS + 1, 1)
        torch.mul(faded, size, out=factors[0])
        terms = factors.cumprod_(0)  # the terms a f u^n, multiplied from left to right
        terms[-1].abs_().div_(root.clamp(max=1.0))
        sums += terms

    def end(self) -> None:
        """Frees the memory that is reserved for further steps."""
        self.sums, self.centre = self.sums[:, : self._count].clone(), self.centre[: self._count].clone()
        del self._faded, self._root


def decay_rows(shard: Tensor, averages: Averages, ids: Tensor, taken: Tensor, history: TakenSteps) -> None:
    """Applies to rows, in place, the Adam steps that they have deferred because they had no gradient.

    Args:
        shard, averages: the weights and running averages, changed in place.
        ids: (K,) int64, the rows, possibly with duplicates.
        taken: (V',) integers, updated in place: how many steps each row has applied.
        history: the deferred steps.
    """
    if ids.numel() == 0:
        return
    if shard.is_cuda and all(map(gpu.supports, (shard, averages.first, averages.second))):
        gpu.decay_rows(shard, averages, ids, taken, history)
        return
    rested = taken.index_select(0, ids)
    behind = (rested < history.steps).nonzero().squeeze(1)
    if behind.numel() == 0:
        return
    ids, rested = ids.index_select(0, behind), rested.index_select(0, behind)
    # Duplicates of an id need no removal within a single block, because they write the same values.
    if ids.numel() > _rows_per_block(shard):
        ids = torch._unique2(ids)[0]
        rested = taken.index_select(0, ids)
    rested = rested.to(torch.int64)
    taken.index_fill_(0, ids, history.steps)
    if history.moments is None:
        left = [_RemainingRows(ids, rested, None)]
    else:
        rows = _rows_per_block(shard)
        # `unsafe_split` makes no Python call per block.
        blocks = zip(ids.unsafe_split(rows), rested.unsafe_split(rows), strict=True)
        leapt = (_apply_together(shard, averages, *block, history, history.moments) for block in blocks)
        left = [each for each in leapt if each is not None]
    for each in left:
        _, order = each.rested.sort()  # rows with the most deferred steps first
        for some in order.unsafe_split(_rows_per_block(shard)):
            _apply_in_order(shard, averages, each.rows(some), history)


class _RemainingRows(NamedTuple):
    """Rows (K,) with elements to which deferred steps must be applied one by one.

    Attributes:
        ids: (K,) the rows.
        rested: (K,) the number of steps that each row has applied.
        leapt: (K, d) the final weights of the elements that are computed already, and nan for all other elements. None
            if no element is computed yet.
    """

    ids: Tensor
    rested: Tensor
    leapt: Tensor | None

    def rows(self, positions: Tensor) -> _RemainingRows:
        """Returns only the rows at these positions (L,) among these rows."""
        leapt = None if self.leapt is None else self.leapt.index_select(0, positions)
        return _RemainingRows(self.ids.index_select(0, positions), self.rested.index_select(0, positions), leapt)


def _rows_per_block(shard: Tensor) -> int:
    """Returns the number of rows of a shard to process at once, so that they stay in cache."""
    return max(1, _ELEMENTS // (STEPS_PER_BLOCK * max(1, shard.shape[1])))


def _apply_together(
    shard: Tensor, averages: Averages, ids: Tensor, taken: Tensor, history: TakenSteps, moments: Moments
) -> _RemainingRows | None:
    """Applies all deferred steps at once to rows of a shard.

    Args:
        shard, averages: the weights and running averages, changed in place.
        ids: (K,) the rows.
        taken: (K,) the number of steps that each row has applied.
        history: the deferred steps.
        moments: the sums over these steps.

    Returns:
        The rows that have elements whose result would not be exact to the last bit, or None if there are no such rows.
            These rows are unchanged, and the steps must be applied to them one by one.
    """
    coefficients, dtype = history.coefficients, shard.dtype
    exp_avg, exp_avg_sq, greatest = averages
    weight, first, second = shard.index_select(0, ids), exp_avg.index_select(0, ids), exp_avg_sq.index_select(0, ids)
    root = second.sqrt() if greatest is None else greatest.index_select(0, ids).sqrt_()
    fade_first, fade_second, shrink = _decay_factors(coefficients.index_select(0, taken), history, dtype)
    sums = moments.sums.index_select(1, taken).to(dtype).unsqueeze(-1).unbind()  # a list of TERMS + 1 tensors (K, 1)
    root.mul_(moments.centre.index_select(0, taken).to(dtype)[:, None])
    divisor = root + moments.eps
    y = root.div_(divisor)
    total = torch.addcmul(sums[-3], sums[-2], y)
    for each in sums[-4::-1]:
        torch.addcmul(each, total, y, out=total)
    share = first / divisor
    moved = total.mul_(share)
    weight.mul_(shrink)
    least = torch.maximum(weight.abs(), moved.abs()).mul_(torch.finfo(dtype).eps / 4)
    fourth = y.mul_(y).mul_(y)
    left_out = share.abs_().mul_(fourth).mul_(fourth).mul_(fourth).mul_(sums[-1])
    done = left_out <= least
    weight.sub_(moved)
    first.mul_(fade_first)
    second.mul_(fade_second)
    found, left = (weight, first, second), None
    if not bool(done.all()):
        of_rows = done.all(1)
        places, others = of_rows.nonzero().squeeze(1), of_rows.logical_not_().nonzero().squeeze(1)
        leapt = weight.masked_fill(done.logical_not_(), math.nan)
        left = _RemainingRows(ids, taken, leapt).rows(others)
        ids, found = ids.index_select(0, places), (weight[places], first[places], second[places])
    for tensor, values in zip((shard, exp_avg, exp_avg_sq), found, strict=True):
        tensor.index_copy_(0, ids, values)
    return left


def _apply_in_order(shard: Tensor, averages: Averages, rows: _RemainingRows, history: TakenSteps) -> None:
    """Applies the deferred steps one by one to rows.

    The result of an element does not depend on other elements, so it is bitwise the same for any split of the columns
    over ranks.

    Args:
        shard, averages: the weights and running averages, changed in place.
        rows: the rows, sorted by their number of deferred steps, largest first.
        history: the deferred steps.
    """
    ids, taken, leapt = rows
    coefficients, until = history.coefficients, history.steps
    exp_avg, exp_avg_sq, max_exp_avg_sq = averages
    weight, first, second = shard.index_select(0, ids), exp_avg.index_select(0, ids), exp_avg_sq.index_select(0, ids)
    root = second.sqrt() if max_exp_avg_sq is None else max_exp_avg_sq.index_select(0, ids).sqrt_()
    before, last = coefficients.index_select(0, taken), coefficients[until]
    fade_first, fade_second, shrink = _decay_factors(before, history, shard.dtype)
    weight.mul_(shrink)
    negligible = weight.abs().mul_(torch.finfo(shard.dtype).eps / 4 * (1 - history.ratio))
    largest = first.abs().mul_(history.largest)
    moved, ended = torch.zeros_like(weight), torch.zeros_like(weight, dtype=torch.bool)
    longest, done = until - int(taken[0]) if ids.numel() else 0, 0
    while done < longest:
        active = int((taken < until - done).sum())
        # Process as many blocks at once as stay in cache. The sum of a row is still computed block by block.
        most = _ELEMENTS // max(1, STEPS_PER_BLOCK * weight[:active].numel())
        blocks = max(1, min(most, -(-(longest - done) // STEPS_PER_BLOCK)))
        steps = torch.arange(done + 1, done + blocks * STEPS_PER_BLOCK + 1, device=ids.device)
        at = taken[:active, None] + steps
        of_steps = coefficients[at.clamp(max=until)]  # coefficients of each row and step (K, C, 6)
        faded = (of_steps[..., :2] - before[:active, None, :2]).mul_(_HALF_OF_SECOND.to(ids.device)).exp_()
        if max_exp_avg_sq is not None:
            faded[..., LOG_BETA2] = 1.0
        sizes = of_steps[..., SIZE] * faded[..., LOG_BETA1] * (last[LOG_SHRINK] - of_steps[..., LOG_SHRINK]).exp()
        sizes.masked_fill_(at > until, 0.0)
        roots = of_steps[..., CORRECTION] * faded[..., LOG_BETA2]
        sizes, roots, eps, faded = [t.to(shard.dtype) for t in (sizes, roots, of_steps[..., EPS], faded)]
        divisors = torch.addcmul(eps.unsqueeze(-1), root[:active, None], roots.unsqueeze(-1))
        terms = (first[:active, None] * sizes.unsqueeze(-1)).div_(divisors)
        sums = _halving_sum(terms.view(active, blocks, STEPS_PER_BLOCK, -1))
        # The factors of momentum and root at the last step of each block (K, B, 2).
        ends = faded.view(active, blocks, STEPS_PER_BLOCK, 2)[:, :, -1]
        rest = largest[:active, None] * ends[..., LOG_BETA1, None]
        rest.div_(root[:active, None] * ends[..., LOG_BETA2, None] + history.least_eps)
        is_over = rest <= negligible[:active, None]
        is_over |= (at[:, ::STEPS_PER_BLOCK] > until).unsqueeze(-1)  # blocks after the row's last step
        for block in range(blocks):
            moved[:active].add_(sums[:, block].masked_fill_(ended[:active], 0.0))
            ended[:active].logical_or_(is_over[:, block])
        if bool(ended[:active].all()):
            break
        done += blocks * STEPS_PER_BLOCK
    weight.sub_(moved)
    shard.index_copy_(0, ids, weight if leapt is None else torch.where(leapt.isnan(), weight, leapt))
    exp_avg.index_copy_(0, ids, first.mul_(fade_first))
    exp_avg_sq.index_copy_(0, ids, second.mul_(fade_second))


def _decay_factors(before: Tensor, history: TakenSteps, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns the factors by which the two running averages and the weights decay over all deferred steps; each (K, 1).

    Args:
        before: (K, 6), the coefficients of the last step that each row has applied.
        history: the deferred steps.
        dtype: the dtype of the factors.
    """
    last = history.coefficients[history.steps, :SIZE]
    return (last - before[:, :SIZE]).exp().to(dtype).unsqueeze(-1).unbind(1)


def _halving_sum(terms: Tensor) -> Tensor:
    """Sums terms over steps. Adds pairs of terms, then pairs of sums, so that the rounding does not depend on the
    sizes. Returns (K, B, d).

    Args:
        terms: (K, B, C, d), for K rows with B blocks of C steps each.
    """
    while (half := terms.shape[2] // 2) > 0:
        terms = terms[:, :, :half] + terms[:, :, half:]
    return terms.squeeze(2)


_HALF_OF_SECOND = torch.tensor([1.0, 0.5], dtype=torch.float64, device="cpu")
"""The root of the second average decays by the root of its factor."""
