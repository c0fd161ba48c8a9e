"""Plans made anew while training: when, what becomes of tables, state and gradients, and when not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

import embrace_fx
from embrace_fx.compiled_model import CompiledModel
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.support.drifting import (
    DENSE,
    LINKS,
    OTHER,
    ROWS,
    SPARSE_AGAIN,
    TABLE,
    WIDTH,
    Batch,
    Together,
    Words,
    batch,
    every_call_a_sample,
    make,
)
from tests.support.inside import session_of
from tests.support.messages import logged
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same, train_reference
from tests.support.training import whole_parameters, whole_state


def _both(kind: Callable[..., Optimizer], model: nn.Module) -> list[Optimizer]:
    return [kind(model.parameters())]


def _sparse_adam_beside_adagrad(model: nn.Module) -> list[Optimizer]:
    rest = [p for name, p in model.named_parameters() if name != OTHER]
    return [SparseAdam([model.get_parameter(OTHER)], 0.01, eps=1e-3), Adagrad(rest, lr=0.05, eps=1e-3)]


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "sgd": partial(_both, partial(SGD, lr=0.1)),
    "adagrad": partial(_both, partial(Adagrad, lr=0.05, eps=1e-3)),
    "sparse_adam": _sparse_adam_beside_adagrad,
    "adam": partial(_both, partial(Adam, lr=0.01, eps=1e-3)),
}


@dataclass(frozen=True)
class Case:
    world_size: int
    optimizer: str
    schedule: ScheduleName = "2d"
    lookahead: bool = True
    steps: int = SPARSE_AGAIN.stop
    strategy: Strategy = "auto"
    model: type[Words] = Words


@dataclass
class Found:
    parameters: dict[str, Tensor]
    plans: list[Plan]
    state: dict[str, Any]
    logged: list[str]
    explained: str
    loss: float


def _evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(*batch(0, 0)))


@every_call_a_sample()
def train(rank: int, world_size: int, case: Case) -> Found:
    """Trains on batches whose sparsity changes twice."""
    model = make(seed=rank, kind=case.model)
    compiled = embrace_fx.compile(
        model,
        optimizer=OPTIMIZERS[case.optimizer](model),
        schedule=case.schedule,
        strategy=case.strategy,
        cluster=LINKS,
    )
    plans = []
    batches = [batch(step, rank) for step in range(case.steps)]
    with logged() as lines:
        for each in compiled.lookahead(batches) if case.lookahead else batches:
            compiled(*each).backward()
            for optimizer in compiled.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            plans.append(compiled.plan)
            if len(plans) == 1:
                _evaluate(compiled)
    told = [line for line in lines if line.startswith("planned again")]
    state = {key: value for each in compiled.optimizer for key, value in whole_state(compiled, each).items()}
    return Found(whole_parameters(compiled), plans, state, told, compiled.plan.explain(), _evaluate(compiled))


def expected(case: Case) -> dict[str, Tensor]:
    batches = [[batch(step, rank) for step in range(case.steps)] for rank in range(case.world_size)]
    return train_reference(partial(make, kind=case.model), OPTIMIZERS[case.optimizer], batches, case.steps)


CASES = {
    f"{n}-{optimizer}-{schedule}-{lookahead}": Case(n, optimizer, schedule, lookahead)
    for n in (2, 3)
    for optimizer in OPTIMIZERS
    for schedule in ("none", "horizontal", "vertical", "2d")
    for lookahead in (True, False)
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_through_new_plans_equals_the_reference(case: Case) -> None:
    by_rank = run_ranks(case.world_size, train, case)

    reference = expected(case)
    for found in by_rank:
        assert_same(found.parameters, reference, torch.float64)
        assert [plan[TABLE].strategy for plan in _distinct(found.plans)] == ["alltoall", "allreduce", "alltoall"]
        assert [p.digest() for p in found.plans] == [p.digest() for p in by_rank[0].plans]
        plain = make()
        plain.load_state_dict(found.parameters)
        assert found.loss == pytest.approx(_evaluate(plain))  # evaluated by a program of the first plan
        assert len({plan[OTHER].strategy for plan in found.plans}) == 1
    first, second = (k for k, (a, b) in enumerate(zip(found.plans, found.plans[1:], strict=False)) if a != b)
    assert first in DENSE
    assert second in SPARSE_AGAIN


@pytest.mark.long
def test_a_table_leaves_its_joined_table_and_comes_back() -> None:
    case = Case(2, "adagrad", model=Together)
    reference = expected(case)
    for found in run_ranks(2, train, case):
        assert_same(found.parameters, reference, torch.float64)
        assert [len(plan.spaces) for plan in _distinct(found.plans)] == [1, 0, 1]


def _distinct(plans: list[Plan]) -> list[Plan]:
    return [plan for k, plan in enumerate(plans) if k == 0 or plan != plans[k - 1]]


@pytest.mark.long
def test_a_new_plan_says_what_it_changed_and_why() -> None:
    found, other = run_ranks(2, train, Case(2, "adagrad", steps=DENSE.stop))
    (line,) = found.logged
    assert f"{TABLE} alltoall -> allreduce (" in line
    assert f"of {ROWS} rows read" in line
    assert other.logged == []
    (told,) = found.plans[-1].history
    assert line.endswith(told)
    assert told.startswith("after ")
    assert "".join(told.split()) in "".join(found.explained.split())
    assert found.state[f"{TABLE} sum"].shape == (ROWS, WIDTH)


def _forward_twice(compiled: CompiledModel, first: Batch, second: Batch) -> None:
    (compiled(*first) + compiled(*second)).backward()


def _backward_twice(compiled: CompiledModel, first: Batch, second: Batch) -> None:
    compiled(*first).backward()
    compiled(*second).backward()


def _accumulate(compiled: CompiledModel, first: Batch, second: Batch) -> None:
    with compiled.no_sync():
        compiled(*first).backward()
    compiled(*second).backward()


def _fail_once(compiled: CompiledModel, first: Batch, second: Batch) -> None:
    """Reads an invalid id on one rank when a plan has just been requested."""
    compiled(*first).backward()
    announcements = session_of(compiled).announcements
    if announcements.asked_to_plan:
        bad = torch.full_like(second[0], ROWS) if announcements.communicator.rank == 1 else second[0]
        with pytest.raises(PeerFailure, match=f"rank 1: .*{TABLE}"):
            compiled(bad, second[1])
    compiled(*second).backward()


TWO_BATCHES = {each.__name__.strip("_"): each for each in (_forward_twice, _backward_twice, _accumulate, _fail_once)}


@every_call_a_sample()
def _train_on_pairs(rank: int, world_size: int, how: str) -> tuple[dict[str, Tensor], list[str]]:
    model = make(seed=rank)
    optimizer = Adagrad(model.parameters(), lr=0.05, eps=1e-3)
    compiled = embrace_fx.compile(model, optimizer=optimizer, cluster=LINKS)
    strategies = []
    for step in range(0, DENSE.stop, 2):
        TWO_BATCHES[how](compiled, batch(step, rank), batch(step + 1, rank))
        optimizer.step()
        optimizer.zero_grad()
        strategies.append(compiled.plan[TABLE].strategy)
    return whole_parameters(compiled), list(dict.fromkeys(strategies))


def _reference_on_pairs(world_size: int) -> dict[str, Tensor]:
    model = make()
    optimizer = Adagrad(model.parameters(), lr=0.05, eps=1e-3)
    for step in range(0, DENSE.stop, 2):
        for each, rank in product((step, step + 1), range(world_size)):
            (model(*batch(each, rank)) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_parameters(model)


@pytest.mark.long
@pytest.mark.parametrize("how", TWO_BATCHES)
def test_no_gradient_is_lost(how: str) -> None:
    """Every other call finds a gradient that no step has taken, half a sum, or results still to go backward from."""
    expected = _reference_on_pairs(2)
    for parameters, strategies in run_ranks(2, _train_on_pairs, how):
        assert strategies == ["alltoall", "allreduce"]
        assert_same(parameters, expected, torch.float64)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["alltoall", {"drifting.*": "zen"}])
def test_what_was_asked_for_stays(strategy: Strategy) -> None:
    case = Case(2, "sgd", steps=DENSE.stop, strategy=strategy)
    reference = expected(case)
    for found in run_ranks(2, train, case):
        assert len(_distinct(found.plans)) == 1
        assert TABLE not in found.plans[0].watched
        assert_same(found.parameters, reference, torch.float64)
