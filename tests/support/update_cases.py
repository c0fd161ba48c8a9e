"""What the kernels of row updates must compute: optimizers' steps, and steps that rows have skipped.

Shape legend: as in `tests/support/kernel_cases.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from embrace_fx.runtime.kernels import decay
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table import Member
from tests.support.kernel_values import Put, assert_near, assert_same, plain, random

OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "maximize": True}),
    (SGD, {"lr": torch.tensor(0.125), "weight_decay": 0.01}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True, "maximize": True}),
    (Adagrad, {"lr": 0.1}),
    (Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3, "weight_decay": 0.1}),
    (Adagrad, {"lr": 0.1, "maximize": True}),
    (Adam, {"lr": 0.01}),
    (Adam, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "maximize": True}),
    (Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (AdamW, {"lr": 0.01}),
    (AdamW, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    (SparseAdam, {"lr": 0.01}),
    (SparseAdam, {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-3, "maximize": True}),
]


def update_rows(put: Put) -> None:
    """Three steps of rows 0, 3, 4 and 9, against torch.optim in float64 on a model that has these rows only."""
    ids = torch.tensor([0, 3, 4, 9])
    for kind, options in OPTIMIZERS:
        for dtype, widths in ((torch.float32, (3, 192)), (torch.float64, (1,))):
            for width in widths:
                table = random(11, width, dtype=dtype)
                gradients = [random(4, width, dtype=dtype, seed=step + 1) for step in range(3)]
                # Avoid gradients near zero: Adam divides by their size, which amplifies rounding errors.
                gradients = [gradient.sign() * (gradient.abs() + 0.1) for gradient in gradients]
                shard, state = _train(put, kind, options, table, ids, gradients)
                weight, expected = _train_torch(kind, options, table[ids].double(), gradients)
                untouched = torch.ones(11, dtype=torch.bool).index_fill(0, ids, False)
                assert_same(shard[put(untouched)], table[untouched])
                for found, value in [(shard, weight), *((state[k], v) for k, v in expected.items())]:
                    assert_near(found[put(ids)], value, dtype)


def update_rows_of_bfloat16(put: Put) -> None:
    """Takes one step, which is computed in float32 and rounded once."""
    ids = torch.tensor([8, 0])
    for kind, options in OPTIMIZERS:
        table, gradient = random(9, 33, dtype=torch.bfloat16), random(2, 33, dtype=torch.bfloat16, seed=1)
        shard, _ = _train(put, kind, options, table, ids, [gradient])
        weight, _ = _train_torch(kind, options, table[ids].double(), [gradient])
        assert_near(shard[put(ids)], weight, torch.bfloat16)


def update_no_rows(put: Put) -> None:
    none = torch.empty(0, dtype=torch.int64)
    for kind, options in OPTIMIZERS:
        for width in (0, 3):
            table = random(5, width)
            shard, _ = _train(put, kind, options, table, none, [torch.empty(0, width)])
            assert_same(shard, table)


def _train(
    put: Put, kind: type[Optimizer], options: dict[str, Any], table: Tensor, ids: Tensor, gradients: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    make: Any = kind
    parameter = nn.Parameter(put(table.clone()))
    made = Member(parameter, Layout.of_table("t", table.shape), "lazy", make([parameter], **options))
    made.begin_step().finish([(put(ids[:0]), put(gradients[0][:0]))])  # an empty step, to create the state
    made.store.keep({name: value * 0 for name, value in made.state.items() if name == "step"})
    for gradient in gradients:
        made.begin_step().finish([(put(ids), put(gradient))])
    return made.local, {name: value for name, value in made.state.items() if isinstance(value, Tensor)}


def _train_torch(
    kind: type[Optimizer], options: dict[str, Any], table: Tensor, gradients: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The table and its state but for the step counter, after dense steps."""
    make: Any = kind
    parameter = nn.Parameter(table.clone())
    optimizer = make([parameter], **options)
    for gradient in gradients:
        parameter.grad = gradient.double()
        if kind is SparseAdam:
            every = torch.arange(table.shape[0])[None]
            with torch.sparse.check_sparse_tensor_invariants():
                parameter.grad = torch.sparse_coo_tensor(every, parameter.grad, table.shape, is_coalesced=True)
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), {k: v for k, v in state.items() if isinstance(v, Tensor) and v.ndim}


def decay_rows(put: Put) -> None:
    """Rows that have skipped 1 to 40 steps of an AdamW, one of them named twice; rows that have skipped none."""
    taken = torch.tensor([0, 39, 40, 41, 20, 5, 0], dtype=torch.int32)
    ids = torch.tensor([5, 1, 0, 5, 3, 2, 4])
    single, double = torch.float32, torch.float64
    for dtype, width, amsgrad in ((single, 0, False), (single, 33, True), (single, 1500, False), (double, 1, True)):
        weight, first = random(7, width, dtype=dtype), random(7, width, dtype=dtype, seed=1)
        second = random(7, width, dtype=dtype, seed=2).square()
        greatest = second + 0.1 if amsgrad else None
        given = [put(each) for each in (weight, first, second)]
        averages = decay.Averages(given[1], given[2], None if greatest is None else put(greatest))
        history, counted = _decay_history(40), put(taken)
        on_device = history._replace(coefficients=put(history.coefficients))
        decay.decay_rows(given[0], averages, put(ids), counted, on_device)
        assert plain(counted).tolist() == [40, 40, 40, 41, 40, 40, 0]
        wide = [each.double() for each in (weight, first, second)]
        for found, expected in zip(given, _decayed(wide, greatest, taken, history), strict=True):
            assert_near(found[:6], expected[:6], dtype)
        assert_same(given[0][6:], weight[6:])


def _decay_history(count: int) -> decay.TakenSteps:
    beta1, beta2, shrink, eps = 0.9, 0.99, 0.999, 1e-3
    coefficients = torch.zeros(count + 1, decay.COLUMNS, dtype=torch.float64)
    for step in range(1, count + 1):
        logs = [step * math.log(factor) for factor in (beta1, beta2, shrink)]
        coefficients[step] = torch.tensor([*logs, 0.01 * (1 + step % 3), 1 + 1 / step, eps], dtype=torch.float64)
    return decay.TakenSteps(coefficients, count, 0.03, eps, beta1 / math.sqrt(beta2))


def _decayed(values: list[Tensor], greatest: Tensor | None, taken: Tensor, history: decay.TakenSteps) -> list[Tensor]:
    """One step after another, in float64."""
    weight, first, second = (each.clone() for each in values)
    for row, begun in enumerate(taken.tolist()):
        for step in range(begun + 1, history.steps + 1):
            before, now = history.coefficients[step - 1], history.coefficients[step]
            beta1, beta2, shrink = (now[:3] - before[:3]).exp()
            first[row] *= beta1
            second[row] *= beta2
            under = second[row] if greatest is None else greatest[row].double()
            divisor = under.sqrt() * now[decay.CORRECTION] + now[decay.EPS]
            weight[row] = weight[row] * shrink - now[decay.SIZE] * first[row] / divisor
    return [weight, first, second]
