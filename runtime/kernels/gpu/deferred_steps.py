"""Applies deferred Adam steps to rows in one kernel, which reads and writes each row's averages once.

The sum over a row's deferred steps is computed in registers, and ends early for rows with few of them or without
momentum. A row with duplicate ids is processed by the first program that claims it.

Shape legend: V' x d this rank's part of a table; K rows; T steps of the history.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from embrace_fx.runtime.kernels.decay import COLUMNS as COEFFICIENTS
from embrace_fx.runtime.kernels.decay import Averages, TakenSteps
from embrace_fx.runtime.kernels.gpu.tiles import choose_tile, on_tensor_device, require_contiguous, sum_type


@triton.jit(do_not_specialize=["until"])
def _decay(
    shard, exp_avg, exp_avg_sq, max_exp_avg_sq, ids, taken, until, coefficients, width: tl.constexpr,
    largest: tl.float64, least_eps: tl.float64, bit: tl.float64,
    AMSGRAD: tl.constexpr, STRIDE: tl.constexpr, SUM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: applies deferred Adam steps to one row of a table and to its running averages, in place.

    Args:
        shard: (V', d), this rank's weights.
        exp_avg, exp_avg_sq, max_exp_avg_sq: (V', d), Adam's running averages. The last one is read only if `AMSGRAD`.
        ids: (K,), the indices of the rows to update, one per program.
        taken: (V',), the number of steps that each row has applied so far, updated in place.
        until: the number of steps that each row has applied after the call (T).
        coefficients, largest, least_eps: the history of steps, as in `TakenSteps`.
        width: the number of columns of a row (d).
        bit: the fraction of a weight below which an update is negligible.
        STRIDE: the number of columns of `coefficients`.
        SUM: the dtype in which to compute.
        COLUMNS: the number of columns of a tile.
    """
    row = tl.load(ids + tl.program_id(0))
    begun = tl.atomic_max(taken + row, until)
    if begun < until:
        before = coefficients + begun * STRIDE
        last = coefficients + until * STRIDE
        log1, log2, log3 = tl.load(before), tl.load(before + 1), tl.load(before + 2)
        shrink = tl.exp(tl.load(last + 2) - log3)
        for start in range(0, width, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            at = row * width + column
            inside = column < width
            weight = tl.load(shard + at, mask=inside, other=0.0).to(SUM) * shrink.to(SUM)
            first = tl.load(exp_avg + at, mask=inside, other=0.0).to(SUM)
            second = tl.load(exp_avg_sq + at, mask=inside, other=0.0).to(SUM)
            if AMSGRAD:
                root = tl.sqrt(tl.load(max_exp_avg_sq + at, mask=inside, other=0.0).to(SUM))
            else:
                root = tl.sqrt(second)
            negligible = tl.abs(weight) * tl.full((1,), bit, SUM)
            moved = tl.zeros_like(weight)
            step = begun + 1
            alive = 1
            while alive > 0:
                now = coefficients + step * STRIDE
                faded1 = tl.exp(tl.load(now) - log1)
                faded2 = tl.exp(0.5 * (tl.load(now + 1) - log2))
                if AMSGRAD:
                    faded2 = faded2 * 0.0 + 1.0
                size = tl.load(now + 3) * faded1 * tl.exp(tl.load(last + 2) - tl.load(now + 2))
                divisor = root * (tl.load(now + 4) * faded2).to(SUM) + tl.load(now + 5).to(SUM)
                moved += first * size.to(SUM) / divisor
                rest = (
                    tl.abs(first) * (largest * faded1).to(SUM) / (root * faded2.to(SUM) + tl.full((1,), least_eps, SUM))
                )
                step += 1
                over = tl.max((rest > negligible).to(tl.int32), axis=0)
                alive = over * (step <= until).to(tl.int32)
            tl.store(shard + at, (weight - moved).to(shard.dtype.element_ty), mask=inside)
            first *= tl.exp(tl.load(last) - log1).to(SUM)
            second *= tl.exp(tl.load(last + 1) - log2).to(SUM)
            tl.store(exp_avg + at, first.to(exp_avg.dtype.element_ty), mask=inside)
            tl.store(exp_avg_sq + at, second.to(exp_avg_sq.dtype.element_ty), mask=inside)


@on_tensor_device
def decay_rows(shard: Tensor, averages: Averages, ids: Tensor, taken: Tensor, history: TakenSteps) -> None:
    """Applies deferred Adam steps to the rows `ids` of a table, in place, with a CUDA kernel.

    Args:
        shard, averages, ids, taken, history: as for `embrace_fx.runtime.kernels.decay.decay_rows`.

    Raises:
        ValueError: an argument is not contiguous.
    """
    state = {name: value for name, value in averages._asdict().items() if value is not None}
    coefficients, until, largest, least_eps, ratio, _ = history
    require_contiguous("decay_rows", shard=shard, ids=ids, taken=taken, coefficients=coefficients, **state)
    if ids.numel() == 0:
        return
    columns = choose_tile(max(1, shard.shape[1]), shard.itemsize, tensors=5).columns
    first, second, greatest = averages
    _decay[(ids.numel(),)](
        shard, first, second, second if greatest is None else greatest, ids, taken, until, coefficients, shard.shape[1],
        largest, least_eps, torch.finfo(shard.dtype).eps / 4 * (1 - ratio),
        AMSGRAD=greatest is not None, STRIDE=COEFFICIENTS, SUM=sum_type(shard.dtype), COLUMNS=columns,
    )  # fmt: skip
