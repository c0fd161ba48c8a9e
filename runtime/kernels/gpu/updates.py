"""Triton kernels for optimizer updates of rows. Each reads and writes an updated row and its state once.

The formulas are those of torch's single-tensor updates, in which every operation is a pass over (K, d) values. Values
are computed at least in float32 and rounded once, when stored, so a bfloat16 table loses less precision than with
torch's.

Shape legend
    V rows of the table; d columns of it that this rank owns; K rows with gradient.

An element's update depends only on that element, so one step's rows may be updated in several calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from embrace_fx.runtime.kernels.decay import Averages
from embrace_fx.runtime.kernels.gpu import AdamStep
from embrace_fx.runtime.kernels.gpu.tiles import choose_tile, offsets, on_tensor_device, require_contiguous, sum_type

# Memory bandwidth limits all three kernels: they do few operations on each row of 3 to 9 tensors. Tiles are smaller
# than for a copy, because the tiles of all tensors are in registers at once. Options are passed as float64, because
# float32 would round the learning rate of a float64 table. Square root and division are correctly rounded, which takes
# no extra time when memory bandwidth is the limit.


@triton.jit
def _quotient(x, y):
    """Returns x / y, correctly rounded."""
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def _root(x):
    """Returns the square root of x, correctly rounded."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def _load(values, at, inside, SUM: tl.constexpr):
    """Loads values at the offsets `at` and casts them to the dtype `SUM`. Where `inside` is false, returns zero."""
    return tl.load(values + at, mask=inside, other=0.0).to(SUM)


@triton.jit
def _store(values, at, value, inside):
    """Casts a value to the dtype of `values`, and stores it at the offsets `at` where `inside` is true."""
    tl.store(values + at, value.to(values.dtype.element_ty), mask=inside)


@triton.jit
def _load_descent(
    rows, shard, source, target, inside, weight_decay,
    DECAY: tl.constexpr, MAXIMIZE: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Loads a tile of gradients and weights. Returns (gradients to descend along, weights): the gradients are negated
    for a maximizing optimizer, and include weight decay.

    Args:
        rows, shard: the gradients (K, d) and the weights (V, d).
        source, target, inside: the tile's offsets in `rows` and in `shard`, and its mask, from `offsets`.
        DECAY, MAXIMIZE: whether there is weight decay, and whether the optimizer maximizes.
        SUM: the dtype in which to compute.
    """
    gradient = _load(rows, source, inside, SUM)
    weight = _load(shard, target, inside, SUM)
    if MAXIMIZE:
        gradient = -gradient
    if DECAY:
        gradient += tl.full((1, 1), weight_decay, SUM) * weight
    return gradient, weight


@triton.jit(do_not_specialize=["count"])
def _sgd(
    shard, buffer, ids, rows, count, width: tl.constexpr,
    lr: tl.float64, momentum: tl.float64, weight_decay: tl.float64,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, DECAY: tl.constexpr, MAXIMIZE: tl.constexpr,
    SUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: applies one SGD step to one tile of rows.

    Args:
        shard, buffer, ids, rows: as for `sgd_rows`.
        count, width: the number of rows to update (K), and of columns (d).
        lr, momentum, weight_decay: options of SGD.
        MOMENTUM, NESTEROV, DECAY, MAXIMIZE: whether each option is used.
        SUM: the dtype in which to compute.
        ROWS, COLUMNS: the size of a tile.
    """
    source, target, inside = offsets(ids, count, width, ROWS, COLUMNS)
    gradient, weight = _load_descent(rows, shard, source, target, inside, weight_decay, DECAY, MAXIMIZE, SUM)
    if MOMENTUM:
        factor = tl.full((1, 1), momentum, SUM)
        velocity = factor * _load(buffer, target, inside, SUM) + gradient
        _store(buffer, target, velocity, inside)
        if NESTEROV:
            gradient += factor * velocity
        else:
            gradient = velocity
    _store(shard, target, weight - tl.full((1, 1), lr, SUM) * gradient, inside)


@on_tensor_device
def sgd_rows(shard: Tensor, buffer: Tensor | None, ids: Tensor, rows: Tensor, options: Mapping[str, Any]) -> None:
    """Applies one SGD step, without dampening, to the rows `ids`, in place.

    Args:
        shard: (V, d), the weights, contiguous, changed in place.
        buffer: (V, d), the optimizer state `momentum_buffer`, contiguous, changed in place, or None without momentum.
        ids: (K,) int64, unique: the rows to update.
        rows: (K, d), contiguous: the gradients.
        options: the options of torch's SGD.

    Raises:
        ValueError: an argument is not contiguous.
    """
    state = {} if buffer is None else {"buffer": buffer}
    require_contiguous("sgd_rows", shard=shard, ids=ids, rows=rows, **state)
    if rows.numel() == 0:
        return
    tile = choose_tile(shard.shape[1], shard.itemsize, tensors=2 + len(state))
    _sgd[tile.grid(*rows.shape)](
        shard, shard if buffer is None else buffer, ids, rows, *rows.shape,
        float(options["lr"]), options["momentum"], options["weight_decay"],
        MOMENTUM=buffer is not None, NESTEROV=options["nesterov"], DECAY=options["weight_decay"] != 0,
        MAXIMIZE=options.get("maximize", False),
        SUM=sum_type(shard.dtype), ROWS=tile.rows, COLUMNS=tile.columns,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _adagrad(
    shard, sums, ids, rows, count, width: tl.constexpr,
    step_size: tl.float64, eps: tl.float64, weight_decay: tl.float64,
    DECAY: tl.constexpr, MAXIMIZE: tl.constexpr, SUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: applies one Adagrad step to one tile of rows.

    Args:
        shard, sums, ids, rows, step_size: as for `adagrad_rows`.
        count, width: the number of rows to update (K), and of columns (d).
        eps, weight_decay: options of Adagrad.
        DECAY, MAXIMIZE: whether each option is used.
        SUM: the dtype in which to compute.
        ROWS, COLUMNS: the size of a tile.
    """
    source, target, inside = offsets(ids, count, width, ROWS, COLUMNS)
    gradient, weight = _load_descent(rows, shard, source, target, inside, weight_decay, DECAY, MAXIMIZE, SUM)
    total = _load(sums, target, inside, SUM) + gradient * gradient
    _store(sums, target, total, inside)
    step = _quotient(gradient, _root(total) + tl.full((1, 1), eps, SUM))
    _store(shard, target, weight - tl.full((1, 1), step_size, SUM) * step, inside)


@on_tensor_device
def adagrad_rows(
    shard: Tensor,
    sums: Tensor,
    ids: Tensor,
    rows: Tensor,
    options: Mapping[str, Any],
    step_size: float,
) -> None:
    """Applies one Adagrad step to the rows `ids`, in place.

    Args:
        shard: (V, d), the weights, contiguous, changed in place.
        sums: (V, d), the optimizer state `sum`, contiguous, changed in place.
        ids: (K,) int64, unique: the rows to update.
        rows: (K, d), contiguous: the gradients.
        options: the options of torch's Adagrad.
        step_size: the learning rate after its decay.

    Raises:
        ValueError: an argument is not contiguous.
    """
    require_contiguous("adagrad_rows", shard=shard, sums=sums, ids=ids, rows=rows)
    if rows.numel() == 0:
        return
    tile = choose_tile(shard.shape[1], shard.itemsize, tensors=3)
    _adagrad[tile.grid(*rows.shape)](
        shard, sums, ids, rows, *rows.shape, step_size, options["eps"], options["weight_decay"],
        DECAY=options["weight_decay"] != 0, MAXIMIZE=options.get("maximize", False),
        SUM=sum_type(shard.dtype), ROWS=tile.rows, COLUMNS=tile.columns,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _adam(
    shard, exp_avg, exp_avg_sq, max_exp_avg_sq, ids, rows, count, width: tl.constexpr,
    step_size: tl.float64, beta1: tl.float64, beta2: tl.float64, eps: tl.float64, correction: tl.float64,
    weight_decay: tl.float64, shrink: tl.float64,
    AMSGRAD: tl.constexpr, DECAY: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr,
    SUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: applies one Adam step to one tile of rows.

    Args:
        shard: the weights (V, d).
        exp_avg, exp_avg_sq, max_exp_avg_sq: the running averages (V, d); the last one is read if `AMSGRAD`.
        ids, rows: as for `adam_rows`.
        count, width: the number of rows to update (K), and of columns (d).
        step_size, beta1, beta2, eps, correction, weight_decay, shrink: as in `AdamStep`.
        DECAY, DECOUPLED: whether weight decay is added to the gradient, or shrinks the weight.
        SUM: the dtype in which to compute.
        ROWS, COLUMNS: the size of a tile.
    """
    source, target, inside = offsets(ids, count, width, ROWS, COLUMNS)
    gradient, weight = _load_descent(rows, shard, source, target, inside, weight_decay, DECAY, MAXIMIZE, SUM)
    if DECOUPLED:
        weight *= tl.full((1, 1), shrink, SUM)
    first = _load(exp_avg, target, inside, SUM)
    first += tl.full((1, 1), 1 - beta1, SUM) * (gradient - first)
    _store(exp_avg, target, first, inside)
    second = tl.full((1, 1), beta2, SUM) * _load(exp_avg_sq, target, inside, SUM)
    second += tl.full((1, 1), 1 - beta2, SUM) * gradient * gradient
    _store(exp_avg_sq, target, second, inside)
    if AMSGRAD:
        second = tl.maximum(_load(max_exp_avg_sq, target, inside, SUM), second, propagate_nan=tl.PropagateNan.ALL)
        _store(max_exp_avg_sq, target, second, inside)
    denominator = _root(second) * tl.full((1, 1), correction, SUM) + tl.full((1, 1), eps, SUM)
    _store(shard, target, weight - tl.full((1, 1), step_size, SUM) * _quotient(first, denominator), inside)


@on_tensor_device
def adam_rows(shard: Tensor, averages: Averages, ids: Tensor, rows: Tensor, step: AdamStep) -> None:
    """Applies one step of Adam, AdamW or SparseAdam to the rows `ids`, in place.

    Args:
        shard, averages: (V, d) each: the weights and running averages, contiguous, changed in place.
        ids: (K,) int64, unique: the rows to update.
        rows: (K, d), contiguous: the gradients.
        step: the coefficients of the step.

    Raises:
        ValueError: an argument is not contiguous.
    """
    state = {name: value for name, value in averages._asdict().items() if value is not None}
    require_contiguous("adam_rows", shard=shard, ids=ids, rows=rows, **state)
    if rows.numel() == 0:
        return
    tile = choose_tile(shard.shape[1], shard.itemsize, tensors=2 + len(state))
    _adam[tile.grid(*rows.shape)](
        shard, averages.first, averages.second, averages.second if averages.greatest is None else averages.greatest,
        ids, rows, *rows.shape,
        step.step_size, *step.betas, step.eps, step.correction, step.weight_decay, step.shrink,
        AMSGRAD=averages.greatest is not None, DECAY=step.weight_decay != 0 and step.shrink == 1,
        DECOUPLED=step.shrink != 1, MAXIMIZE=step.maximize,
        SUM=sum_type(shard.dtype), ROWS=tile.rows, COLUMNS=tile.columns,
    )  # fmt: skip
