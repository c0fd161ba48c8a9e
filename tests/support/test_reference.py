"""What counts as the same."""

from __future__ import annotations

import pytest
import torch

from tests.support.reference import assert_same


def test_nan_a_missing_parameter_another_shape_and_another_dtype_are_not_the_same() -> None:
    one = torch.ones(2)
    for found, message in (
        ({"w": torch.tensor([1.0, float("nan")])}, "w: differs by nan"),
        ({}, r"expected the parameters \['w'\], found \[\]"),
        ({"w": torch.ones(3)}, r"expected shape \(2,\), found \(3,\)"),
        ({"w": one.double()}, "expected torch.float32, found torch.float64"),
    ):
        with pytest.raises(AssertionError, match=message):
            assert_same(found, {"w": one}, torch.float32)
