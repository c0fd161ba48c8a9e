"""Values that kernels are tried on, and how what they compute is compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Put = Callable[[Tensor], Tensor]
"""A tensor on the CPU -> a copy of it where the kernels run."""

WIDTHS = (1, 3, 33, 192)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
ROUNDING = {torch.float32: 2e-6, torch.float64: 1e-14, torch.bfloat16: 2**-7}
"""Relative error of a few operations and one rounding. The interpreter cuts bfloat16 off instead of rounding it."""


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_ids(count: int, num_rows: int, seed: int = 0) -> Tensor:
    """Returns random ids with repetitions. Id 0 is always one of them."""
    ids = torch.randint(num_rows, (count,), generator=torch.Generator().manual_seed(seed))
    ids[: min(count, 1)] = 0
    return ids


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compares both as float64, with the tolerance of `dtype`, to which the result was rounded."""
    assert found.dtype == dtype
    tolerance = ROUNDING[dtype]
    torch.testing.assert_close(plain(found).double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def plain(tensor: Tensor) -> Tensor:
    """Returns the tensor on the CPU, as a plain `torch.Tensor`."""
    return tensor.cpu().as_subclass(Tensor)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(plain(found), expected, rtol=0, atol=0, equal_nan=True)
