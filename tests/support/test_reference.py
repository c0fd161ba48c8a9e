"""The reference against what it stands for: DDP, torch's own sparse gradients, plain training loops."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.support.models import MODELS, Batch, Workload
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same, train_reference
from tests.support.training import make_optimizers

STEPS = 6
WORKLOADS = dict(MODELS)


def _varying(name: str) -> Workload:
    workload: Any = WORKLOADS[name]
    return replace(workload, vary=True)


def _make(workload: Workload) -> nn.Module:
    return workload.make(torch.float64, seed=0)


def _batches(workload: Workload, world_size: int) -> list[list[Batch]]:
    return [[workload.batches(step, rank, 0) for step in range(STEPS)] for rank in range(world_size)]


def _train_with_ddp(rank: int, world_size: int, workload: Workload) -> dict[str, Tensor]:
    model = _make(workload)
    (optimizer,) = make_optimizers("adam", model)
    parallel = DistributedDataParallel(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        parallel(*workload.batches(step, rank, 0)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", WORKLOADS)
def test_it_equals_ddp_on_uneven_batches(name: str) -> None:
    workload = _varying(name)
    expected = train_reference(partial(_make, workload), partial(make_optimizers, "adam"), _batches(workload, 3), STEPS)
    for parameters in run_ranks(3, _train_with_ddp, workload):
        assert_same(parameters, expected, torch.float64)


@pytest.mark.parametrize("name", ["two_table_lm", "transformer_encoder", "bag_recommender"])
def test_sparse_adam_equals_torch_with_its_own_sparse_gradients(name: str) -> None:
    workload = _varying(name)
    model = _make(workload)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = True
    optimizers = make_optimizers("sparse_adam", model)
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(2):
            (model(*workload.batches(step, rank, 0)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()

    found = train_reference(
        partial(_make, workload), partial(make_optimizers, "sparse_adam"), _batches(workload, 2), STEPS
    )

    assert_same(dict(model.named_parameters()), found, torch.float64)


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
