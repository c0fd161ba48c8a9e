"""The reference against formulas of its own, and what counts as the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.support.reference import assert_same, train_reference


class _SumOfRows(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(table.clone(), freeze=False)

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        return rows.sum()


def test_lazy_momentum_follows_torch_s_formula_on_the_steps_that_touch_a_row() -> None:
    lr, momentum, decay = 0.1, 0.9, 0.01
    start = torch.randn(3, 1, dtype=torch.float64)
    batches = [torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([0, 0])]

    found = train_reference(
        lambda: _SumOfRows(start),
        lambda model: [SGD(model.parameters(), lr, momentum=momentum, weight_decay=decay)],
        [batches],
        len(batches),
        "lazy",
        ["table.weight"],
    )["table.weight"]

    expected = start.clone()
    for row, gradients in ((0, [1.0, 2.0]), (1, [1.0, 1.0])):
        velocity = torch.zeros(1, dtype=torch.float64)
        for gradient in gradients:
            velocity = momentum * velocity + gradient + decay * expected[row]
            expected[row] -= lr * velocity
    assert_same({"w": found}, {"w": expected}, torch.float64)


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
