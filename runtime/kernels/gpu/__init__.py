"""Triton kernels for CUDA tensors, which `runtime/kernels` and the row updates call.

Contract
    Every function here has an equivalent in torch ops, which is used for CPU tensors and for tensors that `supports`
    rejects. Both are tested against one float64 reference (`tests/support/kernel_cases.py`). Sums are at least float32,
    in the same order as the equivalent, without floating-point atomics, so that equal inputs give equal bits.

Each file imports Triton and is imported at the first use of a name here, so that CPUs do not need Triton.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from embrace_fx.runtime.kernels.gpu.columns import pack_columns as pack_columns
    from embrace_fx.runtime.kernels.gpu.columns import unpack_columns as unpack_columns
    from embrace_fx.runtime.kernels.gpu.deferred_steps import decay_rows as decay_rows
    from embrace_fx.runtime.kernels.gpu.sums import find_segments as find_segments
    from embrace_fx.runtime.kernels.gpu.sums import known_segments as known_segments
    from embrace_fx.runtime.kernels.gpu.sums import sum_segments as sum_segments
    from embrace_fx.runtime.kernels.gpu.updates import adagrad_rows as adagrad_rows
    from embrace_fx.runtime.kernels.gpu.updates import adam_rows as adam_rows
    from embrace_fx.runtime.kernels.gpu.updates import sgd_rows as sgd_rows

_FILES = {
    "columns": ("pack_columns", "unpack_columns"),
    "deferred_steps": ("decay_rows",),
    "sums": ("find_segments", "known_segments", "sum_segments"),
    "updates": ("adagrad_rows", "adam_rows", "sgd_rows"),
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            globals()[name] = kernel = getattr(import_module(f"{__name__}.{file}"), name)
            return kernel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class AdamStep(NamedTuple):
    """The coefficients of one step of Adam, AdamW (lazy) or SparseAdam: w -= step_size * m / (sqrt(v) * correction +
    eps).

    Attributes:
        step_size: the learning rate divided by the bias correction of m; for SparseAdam, also multiplied by the square
            root of the bias correction of v.
        betas, eps, maximize: the optimizer's options.
        correction: 1 / sqrt(1 - beta2^t) for Adam and AdamW; 1 for SparseAdam, which adds eps to the uncorrected root.
        weight_decay: for Adam, the factor of the weight in the term that is added to the gradient.
        shrink: for AdamW, the factor by which the weight is multiplied before the step: 1 - lr * weight_decay.
    """

    step_size: float
    betas: tuple[float, float]
    eps: float
    correction: float
    weight_decay: float = 0.0
    shrink: float = 1.0
    maximize: bool = False


@cache
def available() -> bool:
    """Returns whether Triton is installed. CUDA builds of torch include it on Linux."""
    return find_spec("triton") is not None


def supports(values: Tensor) -> bool:
    """Returns whether the kernels support the dtype and layout of these rows."""
    return values.dtype in _DTYPES and values.is_contiguous() and available()


_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
