"""Row-wise Adagrad on whole tables, against its formula; on shards it is held to this in tests/training."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import embrace_fx


def test_a_row_has_one_sum_and_stands_still_without_a_gradient() -> None:
    table = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64))
    bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = embrace_fx.RowWiseAdagrad([table, bias], lr=0.5, eps=0.0, initial_accumulator_value=1.0)
    for _ in range(2):
        table.grad = torch.tensor([[3.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
        bias.grad = torch.tensor([2.0, 0.0], dtype=torch.float64)
        optimizer.step()

    assert embrace_fx.RowWiseAdagrad([bias]).defaults == {"lr": 0.01, "eps": 1e-8, "initial_accumulator_value": 0.0}
    sums: Tensor = optimizer.state[table]["sum"]
    assert sums.tolist() == [11.0, 1.0]
    moved = 0.5 * (6**-0.5 + 11**-0.5)
    torch.testing.assert_close(table[0].detach(), torch.tensor([1 - 3 * moved, 2 - moved], dtype=torch.float64))
    assert table[1].tolist() == [3.0, 4.0]
    assert optimizer.state[bias]["sum"].tolist() == [9.0, 1.0]


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="RowWiseAdagrad: lr is"):
        embrace_fx.RowWiseAdagrad([nn.Parameter(torch.ones(1))], lr=-1)
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="RowWiseAdagrad does not support sparse gradients"):
        embrace_fx.RowWiseAdagrad(table.parameters()).step()
