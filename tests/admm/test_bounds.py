"""Step constants: never below the curvature, and not far above it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embrace_fx.admm.bounds import (
    SOFTMAX_CURVATURE,
    TANH_CURVATURE,
    largest_eigenvalue_bound,
    squared_norm_bound,
)


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    exponent=st.integers(-12, 12),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_bound_lies_just_above_the_largest_eigenvalue(
    seed: int, rows: int, columns: int, exponent: int, dtype: torch.dtype
) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 10.0**exponent
    true = float(torch.linalg.matrix_norm(matrix.double(), 2)) ** 2
    assert true * (1 - 1e-5) <= squared_norm_bound(matrix) <= true * min(rows, columns) ** (1 / 32) * (1 + 1e-5)


@pytest.mark.parametrize("size", [1, 128])
def test_the_worst_case_is_the_unit_matrix(size: int) -> None:
    assert largest_eigenvalue_bound(torch.eye(size)) == pytest.approx(size ** (1 / 32), rel=1e-5)


def test_nothing_is_not_curved() -> None:
    assert largest_eigenvalue_bound(torch.zeros(3, 3)) == 0.0


def test_curvature_of_the_loss_and_of_tanh() -> None:
    logits = torch.randn(2000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    q = torch.cat([logits.softmax(-1), torch.tensor([[0.5, 0.5, 0.0, 0.0]], dtype=torch.float64)])
    largest = torch.linalg.eigvalsh(torch.diag_embed(q) - q[:, :, None] * q[:, None, :])[:, -1].max()
    assert float(largest) == pytest.approx(SOFTMAX_CURVATURE)
    t = torch.linspace(-1, 1, 100_001, dtype=torch.float64)
    assert float((2 * t * (1 - t**2)).max()) == pytest.approx(TANH_CURVATURE, abs=1e-8)
    assert math.isclose(TANH_CURVATURE, 4 / (3 * math.sqrt(3)))
