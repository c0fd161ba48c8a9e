"""The reference against what it stands for: DDP, torch's own sparse gradients, plain training loops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer, SparseAdam

from tests.support.models import MODELS, Batch, Workload
from tests.support.ranks import run_ranks
from tests.support.reference import TouchedRows, assert_same, train_reference

STEPS = 6
WORKLOADS = dict(MODELS)
ALL_WORKLOADS = pytest.mark.parametrize("name", list(WORKLOADS))


def _varying(name: str) -> Workload:
    workload: Any = WORKLOADS[name]
    return replace(workload, vary=True)


def _make(workload: Workload) -> nn.Module:
    return workload.make(torch.float64, seed=0)


def _batches(workload: Workload, world_size: int) -> list[list[Batch]]:
    return [[workload.batches(step, rank, 0) for step in range(STEPS)] for rank in range(world_size)]


def _adam(model: nn.Module) -> list[Optimizer]:
    return [Adam(model.parameters(), 0.01, eps=1e-3)]


def _train_with_ddp(rank: int, world_size: int, workload: Workload) -> dict[str, Tensor]:
    model = _make(workload)
    (optimizer,) = _adam(model)
    parallel = DistributedDataParallel(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        parallel(*workload.batches(step, rank, 0)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@ALL_WORKLOADS
def test_it_equals_ddp_on_uneven_batches(name: str) -> None:
    workload = _varying(name)
    expected = train_reference(partial(_make, workload), _adam, _batches(workload, 3), STEPS)
    for parameters in run_ranks(3, _train_with_ddp, workload):
        assert_same(parameters, expected, torch.float64)


def _tables(model: nn.Module) -> dict[str, Tensor]:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {f"{name}.weight": m.weight for name, m in model.named_modules() if isinstance(m, kinds)}


def _split(model: nn.Module, tables: Iterable[Optimizer], lr: float = 0.01) -> list[Optimizer]:
    of_tables = list(_tables(model).values())
    rest = [p for p in model.parameters() if not any(p is table for table in of_tables)]
    return [*tables, SGD(rest, lr)]


def _sparse_adam(model: nn.Module, eps: float = 1e-3) -> list[Optimizer]:
    return _split(model, [SparseAdam(list(_tables(model).values()), 0.01, eps=eps)])


def _lazy_adam(model: nn.Module, eps: float) -> list[Optimizer]:
    return _split(model, [Adam(_tables(model).values(), 0.01, eps=eps)])


def _decaying_momentum(model: nn.Module) -> list[Optimizer]:
    return _split(model, [SGD(_tables(model).values(), 0.1, momentum=0.9, weight_decay=0.1)])


@pytest.mark.parametrize("name", ["two_table_lm", "transformer_encoder", "bag_recommender"])
def test_sparse_adam_equals_torch_with_its_own_sparse_gradients(name: str) -> None:
    workload = _varying(name)
    model = _make(workload)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = True
    optimizers = _sparse_adam(model)
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(2):
            (model(*workload.batches(step, rank, 0)) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()

    found = train_reference(partial(_make, workload), _sparse_adam, _batches(workload, 2), STEPS)

    assert_same(dict(model.named_parameters()), found, torch.float64)


@ALL_WORKLOADS
def test_lazy_adam_equals_sparse_adam_where_eps_vanishes(name: str) -> None:
    # The two place eps differently; otherwise SparseAdam is lazy Adam.
    workload = _varying(name)
    make, batches = partial(_make, workload), _batches(workload, 2)
    sparse = train_reference(make, partial(_sparse_adam, eps=1e-30), batches, STEPS)
    lazy = train_reference(make, partial(_lazy_adam, eps=1e-30), batches, STEPS, "lazy", list(_tables(make())))
    exact = train_reference(make, partial(_lazy_adam, eps=1e-30), batches, STEPS, "exact", list(_tables(make())))
    assert_same(lazy, sparse, torch.float64)
    if name != "tied_lm":  # whose table is touched in all rows at every step
        with pytest.raises(AssertionError, match="differs by"):
            assert_same(exact, sparse, torch.float64)


def test_lazy_rows_stand_still_until_they_are_read_and_exact_rows_do_not() -> None:
    workload = WORKLOADS["two_table_lm"]
    make = partial(_make, workload)
    name = "embedding.weight"
    never = torch.ones(60, dtype=torch.bool)
    for rank in _batches(workload, 2):
        for inputs, *_ in rank:
            never[inputs] = False
    start = dict(make().named_parameters())[name].detach()

    exact = train_reference(make, _decaying_momentum, _batches(workload, 2), STEPS)[name]
    lazy = train_reference(make, _decaying_momentum, _batches(workload, 2), STEPS, "lazy", [name])[name]

    assert 0 < never.sum() < 60
    assert torch.equal(lazy[never], start[never])
    assert (lazy[~never] != start[~never]).all(1).all()
    assert (exact[never] != start[never]).all(1).all()


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


def _rows(touched: TouchedRows, table: Tensor) -> list[int]:
    return touched.rows[table].nonzero().flatten().tolist()


def test_touched_rows_are_those_of_every_lookup_but_the_padding() -> None:
    table = nn.Embedding(6, 2, padding_idx=-1)
    bag = nn.EmbeddingBag(6, 2, padding_idx=0, mode="sum")
    with TouchedRows() as touched:
        table(torch.tensor([[1, 5], [1, 5]]))
        bag(torch.tensor([0, 2, 2]), torch.tensor([0, 1]))
        bag(torch.tensor([[0, 4]]))
    assert _rows(touched, table.weight) == [1]
    assert _rows(touched, bag.weight) == [2, 4]

    with touched:
        F.embedding(torch.tensor([5]), table.weight)  # the same row, for a lookup that has no padding
        F.embedding(torch.tensor([], dtype=torch.int64), bag.weight)
    assert _rows(touched, table.weight) == [1, 5]
    assert _rows(touched, bag.weight) == [2, 4]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_the_tolerance_is_relative_to_the_parameter_s_largest_magnitude(dtype: torch.dtype, tolerance: float) -> None:
    expected = {"w": torch.tensor([[100.0, 1.0], [0.0, 1.0]], dtype=dtype)}
    near = {"w": expected["w"] + torch.tensor([[0.0, 0.0], [90.0 * tolerance, 0.0]], dtype=dtype)}
    far = {"w": expected["w"] + torch.tensor([[0.0, 0.0], [110.0 * tolerance, 0.0]], dtype=dtype)}
    assert_same(near, expected, dtype)
    with pytest.raises(AssertionError, match=r"w: differs by .*; 25% of it, first at \[\[1, 0\]\]"):
        assert_same(far, expected, dtype)


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
