"""The Triton kernels: what `runtime/kernels` and the row updates call where a tensor is on CUDA.

Contract
    Every function here has a twin in torch ops, which is called for tensors on the CPU, and for what `takes` declines;
    both are held to one float64 reference (`tests/support/kernel_cases.py`). Sums are made in float32 at least, in
    the order in which the twin makes them, without floating-point atomics: equal inputs give equal bits.

Each file imports Triton at its head and is itself imported at the first use of a name here, so that a CPU never pays
for Triton, nor needs it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from embrace_fx.runtime.kernels.gpu.columns import pack_columns as pack_columns
    from embrace_fx.runtime.kernels.gpu.columns import unpack_columns as unpack_columns
    from embrace_fx.runtime.kernels.gpu.decay import decay_rows as decay_rows
    from embrace_fx.runtime.kernels.gpu.sums import coalesce as coalesce
    from embrace_fx.runtime.kernels.gpu.updates import adagrad_rows as adagrad_rows
    from embrace_fx.runtime.kernels.gpu.updates import adam_rows as adam_rows
    from embrace_fx.runtime.kernels.gpu.updates import sgd_rows as sgd_rows

_FILES = {
    "columns": ("pack_columns", "unpack_columns"),
    "decay": ("decay_rows",),
    "sums": ("coalesce",),
    "updates": ("adagrad_rows", "adam_rows", "sgd_rows"),
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            globals()[name] = kernel = getattr(import_module(f"{__name__}.{file}"), name)
            return kernel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def available() -> bool:
    """Whether Triton is installed; CUDA builds of torch bring it along on Linux."""
    return find_spec("triton") is not None


def takes(values: Tensor) -> bool:
    """Whether the kernels take rows of this type and layout; what they do not take stays with torch's ops."""
    return values.dtype in _DTYPES and values.is_contiguous() and available()


_DTYPES = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})
