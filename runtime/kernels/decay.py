"""Rows of an Adam that have rested, brought up to date (`embrace_fx.runtime.optimizer.skipped_steps.Decaying`).

Shape legend: V' x d this rank's part of a table; K rows; C steps of a block; T steps of the history.
"""

from __future__ import annotations

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
"""Of a block of steps of some rows: few enough to stay in cache."""


class Averages(NamedTuple):
    """An Adam's of a table, (V', d) each; `greatest`, with amsgrad, takes the place of `second` in the denominator."""

    first: Tensor
    second: Tensor
    greatest: Tensor | None


class History(NamedTuple):
    """Steps, and what tells that all further ones of a row together do not reach the last bit of its weights.

    Attributes:
        coefficients: (T + 1, 6) float64.
        steps: how many they are.
        largest: size of any.
        least_eps: of any.
        ratio: how much of an update without gradient the next one can be: beta1 / sqrt(beta2).
    """

    coefficients: Tensor
    steps: int
    largest: float
    least_eps: float
    ratio: float


def decay_rows(shard: Tensor, averages: Averages, ids: Tensor, taken: Tensor, history: History) -> None:
    """Has rows take the steps that they have skipped, none of which had a gradient for them, in place.

    Args:
        shard, averages: written.
        ids: (K,) int64; some may be the same.
        taken: (V',) int32, written: how many steps of the history each row has taken; of all and more, nothing is done.
    """
    if ids.numel() == 0:
        return
    if shard.is_cuda and all(map(gpu.takes, (shard, averages.first, averages.second))):
        gpu.decay_rows(shard, averages, ids, taken, history)
        return
    ids = ids[taken.index_select(0, ids) < history.steps].unique()
    rested, order = taken.index_select(0, ids).to(torch.int64).sort()  # those that have rested longest first
    ids = ids.index_select(0, order)
    taken.index_fill_(0, ids, history.steps)
    rows = max(1, _ELEMENTS // (STEPS_PER_BLOCK * max(1, shard.shape[1])))
    for block, begun in zip(ids.split(rows), rested.split(rows), strict=True):
        _decay(shard, averages, block, begun, history)


def _decay(shard: Tensor, averages: Averages, ids: Tensor, taken: Tensor, history: History) -> None:
    """Likewise of rows (K,), no two the same, that have taken `taken` (K,) steps, in order."""
    coefficients, until = history.coefficients, history.steps
    exp_avg, exp_avg_sq, max_exp_avg_sq = averages
    weight, first, second = (each.index_select(0, ids) for each in (shard, exp_avg, exp_avg_sq))
    root = second.sqrt() if max_exp_avg_sq is None else max_exp_avg_sq.index_select(0, ids).sqrt_()
    before, last = coefficients.index_select(0, taken), coefficients[until]
    whole = (last[:SIZE] - before[:, :SIZE]).exp().to(shard.dtype)  # (K, 3)
    weight.mul_(whole[:, LOG_SHRINK, None])
    negligible = weight.abs().mul_(torch.finfo(shard.dtype).eps / 4 * (1 - history.ratio))
    largest = first.abs().mul_(history.largest)
    steps = torch.arange(1, STEPS_PER_BLOCK + 1, device=ids.device)
    moved = torch.zeros_like(weight)
    longest, done = until - int(taken[0]) if ids.numel() else 0, 0
    while done < longest:
        active = int((taken < until - done).sum())
        at = taken[:active, None] + (done + steps)
        of_steps = coefficients[at.clamp(max=until)]  # (K, C, 6)
        faded = (of_steps[..., :2] - before[:active, None, :2]).mul_(_HALF_OF_SECOND.to(ids.device)).exp_()
        if max_exp_avg_sq is not None:
            faded[..., LOG_BETA2] = 1.0
        sizes = of_steps[..., SIZE] * faded[..., LOG_BETA1] * (last[LOG_SHRINK] - of_steps[..., LOG_SHRINK]).exp()
        sizes.masked_fill_(at > until, 0.0)
        roots = of_steps[..., CORRECTION] * faded[..., LOG_BETA2]
        sizes, roots, eps, faded = (t.to(shard.dtype) for t in (sizes, roots, of_steps[..., EPS], faded))
        divisors = torch.addcmul(eps.unsqueeze(-1), root[:active, None], roots.unsqueeze(-1))
        moved[:active].add_((first[:active, None] * sizes.unsqueeze(-1)).div_(divisors).sum(1))
        done += STEPS_PER_BLOCK
        rest = largest[:active] * faded[:, -1, LOG_BETA1, None]
        rest.div_(root[:active] * faded[:, -1, LOG_BETA2, None] + history.least_eps)
        if bool((rest <= negligible[:active]).all()):
            break
    shard.index_copy_(0, ids, weight.sub_(moved))
    exp_avg.index_copy_(0, ids, first.mul_(whole[:, LOG_BETA1, None]))
    exp_avg_sq.index_copy_(0, ids, second.mul_(whole[:, LOG_BETA2, None]))


_HALF_OF_SECOND = torch.tensor([1.0, 0.5], dtype=torch.float64)
"""The root of the second average fades by the root of its factor."""
