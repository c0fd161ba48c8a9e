"""Row updates against torch.optim itself: every row touched, few touched, lazy rows, split parts, and the rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Rprop, SparseAdam

from embrace_fx.runtime.tables import own_step
from embrace_fx.runtime.tables.own_step import State
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table import Member
from embrace_fx.runtime.tables.update_rule import DenseUpdate, SparseUpdate
from tests.support.definitions import DTYPES, EXACT, LAZY, STEPS, D, Definition, V

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


ALL = EXACT + LAZY

Step = tuple[Tensor, Tensor]
"""One iteration's ids (K,) and rows (K, D)."""


@pytest.fixture(autouse=True)
def _checked_sparse_tensors() -> Iterator[None]:
    """torch's optimizers build sparse tensors themselves, and warn where nobody said whether to check them."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


def random_table(dtype: torch.dtype, rows: int = V, columns: int = D) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, generator=torch.Generator().manual_seed(1))


def random_steps(
    dtype: torch.dtype, *, sparse: bool, rows: int = V, columns: int = D, steps: int = STEPS
) -> list[Step]:
    """Gradients of `steps` iterations: of every row, or of a random set of rows that is sometimes empty."""
    generator = torch.Generator().manual_seed(2)
    result = []
    for step in range(steps):
        count = 0 if step % 7 == 3 else int(torch.randint(1, rows, (), generator=generator))
        ids = torch.randperm(rows, generator=generator)[:count].sort().values if sparse else torch.arange(rows)
        result.append((ids, torch.randn(len(ids), columns, dtype=dtype, generator=generator)))
    return result


def by_rows(definition: Definition, table: Tensor) -> Member:
    """Returns a table whose rows stay unchanged in steps without a gradient for them."""
    parameter = nn.Parameter(table.clone())
    made = Member(parameter, Layout.of_table("t", table.shape), "lazy", definition(parameter))
    assert made.rule is SparseUpdate
    return made


def train_rows(definition: Definition, table: Tensor, steps: list[Step]) -> tuple[Tensor, State]:
    """Returns the table and its state after the row updates."""
    made = by_rows(definition, table)
    with torch.no_grad():
        for ids, gradient in steps:
            made.begin_step().finish([(ids, gradient)])
    return made.local, made_state(made)


def made_state(table: Member) -> State:
    """Returns the state tensors that a table has so far."""
    return {name: value for name, value in table.state.items() if value is not None}


def train_torch(definition: Definition, table: Tensor, steps: list[Step], *, sparse: bool) -> tuple[Tensor, State]:
    """Returns a table and its state after steps of torch.optim, with sparse gradients or with dense ones."""
    parameter = nn.Parameter(table.clone())
    optimizer = definition(parameter)
    for ids, gradient in steps:
        coalesced = torch.sparse_coo_tensor(ids[None], gradient, table.shape, is_coalesced=True)
        parameter.grad = coalesced if sparse else coalesced.to_dense()
        optimizer.step()
    return parameter.detach(), optimizer.state[parameter]


def assert_same(found: State, expected: State, dtype: torch.dtype, *, bitwise: bool) -> None:
    expected = {name: value for name, value in expected.items() if value is not None}
    assert found.keys() == expected.keys()
    tolerance = 0.0 if bitwise else TOLERANCE[dtype]
    for name, value in expected.items():
        assert type(found[name]) is type(value), name
        torch.testing.assert_close({name: found[name]}, {name: value}, rtol=tolerance, atol=tolerance)


SPARSE_GRADIENTS = [(d, True) for d in EXACT if not d.options.get("fused")]
DENSE_GRADIENTS = [(d, False) for d in EXACT if d.kind is not SparseAdam]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("definition", "sparse"), SPARSE_GRADIENTS + DENSE_GRADIENTS, ids=str)
def test_few_rows_touched_equals_torch(definition: Definition, dtype: torch.dtype, sparse: bool) -> None:
    table, steps = random_table(dtype), random_steps(dtype, sparse=True)
    found, state = train_rows(definition, table, steps)
    expected, expected_state = train_torch(definition, table, steps, sparse=sparse)
    # torch's sparse Adagrad computes in another order than its dense one, which row updates follow.
    bitwise = definition.bitwise and not (sparse and definition.kind is Adagrad)
    assert_same({"table": found, **state}, {"table": expected, **expected_state}, dtype, bitwise=bitwise)


def train_touched_rows_alone(definition: Definition, table: Tensor, steps: list[Step]) -> tuple[Tensor, State]:
    """Lazy semantics spelled out: an optimizer per row, stepped where the row is touched, on the table's clock."""
    parameters = [nn.Parameter(row[None].clone()) for row in table]
    optimizers = [definition(parameter) for parameter in parameters]
    for step, (ids, gradient) in enumerate(steps, start=1):
        for row, row_gradient in zip(ids.tolist(), gradient, strict=True):
            parameter, state = parameters[row], optimizers[row].state[parameters[row]]
            if definition.kind in (Adam, AdamW) and not state:
                names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if definition.options.get("amsgrad") else 2]
                state.update({name: torch.zeros_like(parameter) for name in names})
            if definition.kind is not SGD:
                state["step"] = torch.tensor(step - 1.0)
            parameter.grad = row_gradient[None]
            optimizers[row].step()
    states = [optimizer.state[parameter] for optimizer, parameter in zip(optimizers, parameters, strict=True)]
    joined: State = {
        name: torch.cat([state[name] for state in states]) for name, value in states[0].items() if name != "step"
    }
    if definition.kind is not SGD:
        joined["step"] = torch.tensor(float(len(steps)))
    return torch.cat([parameter.detach() for parameter in parameters]), joined


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("definition", LAZY, ids=str)
def test_lazy_rows_equal_torch_on_each_row_alone(definition: Definition, dtype: torch.dtype) -> None:
    table, steps = random_table(dtype), random_steps(dtype, sparse=True)
    assert len(torch.cat([ids for ids, _ in steps]).unique()) == V, "every row needs a state to compare"
    found, state = train_rows(definition, table, steps)
    expected, expected_state = train_touched_rows_alone(definition, table, steps)
    assert_same({"table": found, **state}, {"table": expected, **expected_state}, dtype, bitwise=definition.bitwise)


@pytest.mark.parametrize("definition", LAZY, ids=str)
def test_rows_without_gradient_stand_still(definition: Definition) -> None:
    table = random_table(torch.float64)
    steps = [(ids[ids != 4], gradient[ids != 4]) for ids, gradient in random_steps(torch.float64, sparse=True)]
    found, state = train_rows(definition, table, steps)
    assert torch.equal(found[4], table[4])
    assert all(not value[4].any() for name, value in state.items() if name != "step")


def test_rows_begin_with_the_optimizers_first_state() -> None:
    made = by_rows(Definition(Rprop, {"lr": 0.1}), random_table(torch.float64))
    made.begin_step().finish([(torch.tensor([3]), torch.ones((1, D), dtype=torch.float64))])
    made.begin_step().finish([(torch.tensor([3, 4]), torch.ones((2, D), dtype=torch.float64))])
    assert made.state["step_size"][4:6].eq(0.1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("definition", [each for each in LAZY if not each.options.get("fused")], ids=str)
def test_dense_updates_in_parts_equal_torch(definition: Definition, dtype: torch.dtype) -> None:
    table, steps = random_table(dtype), random_steps(dtype, sparse=True)
    parameter = nn.Parameter(table.clone())
    made = Member(parameter, Layout.of_table("t", table.shape), "exact", definition(parameter))
    assert made.rule is DenseUpdate
    with torch.no_grad():
        for ids, gradient in steps:
            step, half = made.begin_step(), len(ids) // 2
            step.apply(ids[:half], gradient[:half])
            step.finish([(ids[half:], gradient[half:])])
    expected, expected_state = train_torch(definition, table, steps, sparse=False)
    assert_same({"table": made.local, **made_state(made)}, {"table": expected, **expected_state}, dtype, bitwise=False)


def train_rows_in_parts(definition: Definition, table: Tensor, steps: list[Step]) -> tuple[Tensor, State]:
    """Each step's rows applied as the prior ones and the delayed ones, the latter under later options of the group."""
    made = by_rows(definition, table)
    group = made.optimizer_of_members.param_groups[0]
    generator = torch.Generator().manual_seed(3)
    for ids, gradient in steps:
        prior = torch.rand(len(ids), generator=generator) < 0.4
        initial_lr, in_parts = float(group["lr"]), made.can_defer()
        step = made.begin_step()
        if in_parts:
            step.apply(ids[prior], gradient[prior])
        set_lr(group, 7.0)
        step.finish([(ids[~prior], gradient[~prior])] if in_parts else [(ids, gradient)])
        set_lr(group, initial_lr)
    assert made.can_defer()
    return made.local, made_state(made)


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Sets the learning rate as PyTorch's schedulers do: in place if it is a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


@pytest.mark.parametrize(("columns", "dtype"), [(1, torch.float64), (5, torch.float32), (33, torch.float64)], ids=str)
@pytest.mark.parametrize("definition", ALL, ids=str)
def test_two_parts_equal_one_bitwise(definition: Definition, dtype: torch.dtype, columns: int) -> None:
    table = random_table(dtype, 97, columns)
    steps = random_steps(dtype, sparse=True, rows=97, columns=columns)
    whole, whole_state = train_rows(definition, table, steps)
    parts, parts_state = train_rows_in_parts(definition, table, steps)
    assert_same({"table": parts, **parts_state}, {"table": whole, **whole_state}, dtype, bitwise=True)


@pytest.mark.parametrize("definition", ALL, ids=str)
def test_update_longer_than_a_block_equals_torch_and_its_column_shards_bitwise(
    definition: Definition, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = 300, 45
    monkeypatch.setattr(own_step, "_ELEMENTS", 3000)
    table = random_table(torch.float32, rows, columns)
    steps = random_steps(torch.float32, sparse=False, rows=rows, columns=columns, steps=3)
    found, state = train_rows(definition, table, steps)
    expected, expected_state = train_torch(definition, table, steps, sparse=definition.kind is SparseAdam)
    assert_same(
        {"table": found, **state}, {"table": expected, **expected_state}, torch.float32, bitwise=definition.bitwise
    )
    shards = [
        train_rows(definition, table[:, a:b].clone(), [(ids, rows[:, a:b].clone()) for ids, rows in steps])[0]
        for a, b in ((0, 23), (23, 45))
    ]
    assert torch.equal(torch.cat(shards, 1), found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("definition", ALL, ids=str)
def test_equals_torch_on_a_gpu(definition: Definition) -> None:
    table = random_table(torch.float64).cuda()
    steps = [(ids.cuda(), gradient.cuda()) for ids, gradient in random_steps(torch.float64, sparse=False)]
    found, state = train_rows(definition, table, steps)
    expected, expected_state = train_torch(definition, table, steps, sparse=definition.kind is SparseAdam)
    step, expected_step = state.pop("step", 0), expected_state.pop("step", 0)
    assert float(step) == float(expected_step)
    assert_same({"table": found, **state}, {"table": expected, **expected_state}, torch.float64, bitwise=False)
