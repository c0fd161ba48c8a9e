"""Plans made anew while training: when, what becomes of tables, state and gradients, and when not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer, SparseAdam

import embrace_fx
from embrace_fx.api import CompiledModel
from embrace_fx.cost.links import Cluster, Link
from embrace_fx.cost.sparsity import measure, with_units
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.planning.findings import Findings, facts_of
from embrace_fx.planning.reads import used_parameters
from embrace_fx.planning.replanning import CONFIRMED_BY, LOOK_EVERY, Drift
from embrace_fx.runtime.optimizer.holders import Holders
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.session import batch_check, plan_in_use
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.support.cases import long_but
from tests.support.graphs import analysed
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same, train_reference
from tests.support.training import whole_parameters, whole_state

ROWS, WIDTH = 120, 10
FEW, MOST = 8, 400
"""Ids of a batch: of 8, each row is read by few; of 400, nearly all are read by each rank."""
LINKS = Cluster(50.0, 1e-3, links=(("all_to_all", Link(20.0, 1e-3)), ("all_reduce", Link(50.0, 1e-3))))
"""So narrow that bytes alone count, and pairwise messages reach less than a ring, as they do on real networks."""
PATIENCE = LOOK_EVERY * (CONFIRMED_BY + 1)
"""Samples after a strong shift by which another plan is in place; here every call is one."""
SPARSE, DENSE = range(8), range(8, 8 + PATIENCE + 8)
SPARSE_AGAIN = range(DENSE.stop, DENSE.stop + PATIENCE + 20)
TABLE, OTHER = "drifting.weight", "steady.weight"


class Words(nn.Module):
    """Two tables: one that batches read more or less of, and one of which they always read few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.drifting = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.steady = nn.Embedding(400, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, steady_ids: Tensor) -> Tensor:
        x = self.linear(self.drifting(ids)).tanh()
        loss: Tensor = (x.mean(0) * self.steady(steady_ids)).sum(-1).square().mean() + x.square().mean()
        return loss


class Together(Words):
    """Both tables are read at once and have no padding row: a stack, while both are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.drifting = nn.Embedding(ROWS, WIDTH)

    def forward(self, ids: Tensor, steady_ids: Tensor) -> Tensor:
        rows, steady = self.drifting(ids), self.steady(steady_ids)
        x = self.linear(rows).tanh()
        loss: Tensor = (x.mean(0) * steady).sum(-1).square().mean() + x.square().mean()
        return loss


Batch = tuple[Tensor, Tensor]


def batch(step: int, rank: int) -> Batch:
    random = torch.Generator().manual_seed(1000 * step + rank)
    count = MOST if step in DENSE else FEW
    return torch.randint(ROWS, (count,), generator=random), torch.randint(400, (6,), generator=random)


def make(seed: int = 0, kind: type[Words] = Words) -> Words:
    torch.manual_seed(seed)
    return kind().double()


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


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("planned again"):
            self.lines.append(record.getMessage())


def _evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(*batch(0, 0)))


def train(rank: int, world_size: int, case: Case) -> Found:
    """Trains through the shifts, every call a sample."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (plan_in_use, batch_check):
            patch.setattr(module, "SAMPLED_EVERY", 1)
        return _train(rank, case)


def _train(rank: int, case: Case) -> Found:
    model = make(seed=rank, kind=case.model)
    compiled = embrace_fx.compile(
        model,
        optimizer=OPTIMIZERS[case.optimizer](model),
        schedule=case.schedule,
        strategy=case.strategy,
        cluster=LINKS,
    )
    kept = _Kept()
    log = logging.getLogger("embrace_fx")
    log.addHandler(kept)
    log.setLevel(logging.INFO)
    plans = []
    batches = [batch(step, rank) for step in range(case.steps)]
    try:
        for each in compiled.lookahead(batches) if case.lookahead else batches:
            compiled(*each).backward()
            for optimizer in compiled.optimizer:
                optimizer.step()
                optimizer.zero_grad()
            plans.append(compiled.plan)
            if len(plans) == 1:
                _evaluate(compiled)
    finally:
        log.removeHandler(kept)
        log.setLevel(logging.NOTSET)
    state = {key: value for each in compiled.optimizer for key, value in whole_state(compiled, each).items()}
    return Found(whole_parameters(compiled), plans, state, kept.lines, compiled.plan.explain(), _evaluate(compiled))


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


@pytest.mark.parametrize(
    "case",
    long_but(("2-sgd-2d-True",), {name: (case,) for name, case in CASES.items()}),
)
def test_training_through_new_plans_equals_the_reference(case: Case) -> None:
    by_rank = run_ranks(case.world_size, train, case)

    sparse, dense = ("allgather", "allreduce") if case.optimizer == "adam" else ("alltoall", "allreduce")
    reference = expected(case)
    for found in by_rank:
        assert_same(found.parameters, reference, torch.float64)
        assert [plan[TABLE].strategy for plan in _distinct(found.plans)] == [sparse, dense, sparse]
        assert [p.digest() for p in found.plans] == [p.digest() for p in by_rank[0].plans]
        plain = make()
        plain.load_state_dict(found.parameters)
        assert found.loss == pytest.approx(_evaluate(plain))  # a program built before the first plan was replaced
        assert len({plan[OTHER].strategy for plan in found.plans}) == 1
    first, second = (k for k, (a, b) in enumerate(zip(found.plans, found.plans[1:], strict=False)) if a != b)
    assert first in DENSE
    assert second in SPARSE_AGAIN


def test_a_table_leaves_its_stack_and_comes_back() -> None:
    case = Case(2, "adagrad", model=Together)
    reference = expected(case)
    for found in run_ranks(2, train, case):
        assert_same(found.parameters, reference, torch.float64)
        assert [len(plan.stacks) for plan in _distinct(found.plans)] == [1, 0, 1]


def _distinct(plans: list[Plan]) -> list[Plan]:
    return [plan for k, plan in enumerate(plans) if k == 0 or plan != plans[k - 1]]


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


# -- what is under way when a plan is asked for ------------------------------------------------------------------------


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
    """As soon as a plan is asked for, one rank's batch has an id outside the table."""
    compiled(*first).backward()
    announcements = compiled._session.announcements
    if announcements.asked_to_plan:
        bad = torch.full_like(second[0], ROWS) if announcements.communicator.rank == 1 else second[0]
        with pytest.raises(PeerFailure, match=f"rank 1: .*{TABLE}"):
            compiled(bad, second[1])
    compiled(*second).backward()


TWO_BATCHES = {each.__name__.strip("_"): each for each in (_forward_twice, _backward_twice, _accumulate, _fail_once)}


def _train_on_pairs(rank: int, world_size: int, how: str) -> tuple[dict[str, Tensor], list[str]]:
    model = make(seed=rank)
    optimizer = Adagrad(model.parameters(), lr=0.05, eps=1e-3)
    compiled = embrace_fx.compile(model, optimizer=optimizer, cluster=LINKS)
    strategies = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (plan_in_use, batch_check):
            patch.setattr(module, "SAMPLED_EVERY", 1)
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


@pytest.mark.parametrize("how", long_but(("backward_twice", "accumulate"), {how: (how,) for how in TWO_BATCHES}))
def test_no_gradient_is_lost(how: str) -> None:
    """Every other call finds a gradient that no step has taken, half a sum, or results still to go backward from."""
    expected = _reference_on_pairs(2)

    for parameters, strategies in run_ranks(2, _train_on_pairs, how):
        assert strategies == ["alltoall", "allreduce"]
        assert_same(parameters, expected, torch.float64)


# -- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["alltoall", {"drifting.*": "zen"}])
def test_what_was_asked_for_is_not_watched(strategy: Strategy) -> None:
    model = make()

    def watched(strategy: Strategy) -> tuple[str, ...]:
        optimizer = SGD(model.parameters(), 0.1)
        plan = embrace_fx.plan(model, [batch(0, 0), batch(0, 1)], optimizer=optimizer, cluster=LINKS, strategy=strategy)
        return plan.watched

    assert TABLE in watched("auto")
    assert TABLE not in watched(strategy)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["alltoall", {"drifting.*": "zen"}])
def test_what_was_asked_for_stays(strategy: Strategy) -> None:
    case = Case(2, "sgd", steps=DENSE.stop, strategy=strategy)
    reference = expected(case)

    for found in run_ranks(2, train, case):
        assert len(_distinct(found.plans)) == 1
        assert TABLE not in found.plans[0].watched
        assert_same(found.parameters, reference, torch.float64)


def _drift() -> Drift:
    """Rank 0's, of the two tables as the first batches of two ranks read them."""
    graph = analysed(make(), *batch(0, 0))
    facts = facts_of(make(), Holders(), "exact", used_parameters(graph), {})
    legal = tuple(replace(fact, row_update_blocker=None) for fact in facts)
    rows = {TABLE: (8, 8), OTHER: (6, 6)}
    findings = Findings(graph, legal, rows, {}, 2, "auto", "2d")
    return Drift(findings.plan(LINKS, "given", None), findings)


def _samples_until_wanted(drift: Drift, rows: Callable[[int], int], limit: int = 200) -> int | None:
    for sample in range(limit):
        drift.observe({TABLE: (rows(sample),) * 2, OTHER: (6, 6)})
        if drift.wants_plan:
            return sample + 1
    return None


def test_a_shift_that_stays_is_answered_soon() -> None:
    found = _samples_until_wanted(_drift(), lambda sample: 115)

    assert found is not None
    assert found <= LOOK_EVERY * (CONFIRMED_BY + 1)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(lambda sample: 8 + sample % 3, id="noise"),
        pytest.param(lambda sample: 115 if sample % 40 == 0 else 8, id="a batch unlike the others now and then"),
        pytest.param(lambda sample: 20, id="more rows, and the same strategy"),
        pytest.param(lambda sample: 8 if sample < 100 else -1, id="a rank that does not know"),
    ],
)
def test_what_changes_no_strategy_clearly_is_left_alone(rows: Callable[[int], int]) -> None:
    assert _samples_until_wanted(_drift(), rows) is None


def test_on_the_border_the_strategy_in_use_stays() -> None:
    """Between the two densities at which one strategy gives way to the other, either stays."""
    drift = _drift()
    findings, plan = drift._findings, drift._plan
    at = {
        name: [
            findings.with_rows({TABLE: (rows, rows)}).plan(LINKS, "given", current)[TABLE].strategy
            for rows in range(1, ROWS + 1)
        ]
        for name, current in (
            ("sharded", plan),
            ("replicated", findings.with_rows({TABLE: (ROWS, ROWS)}).plan(LINKS, "given", None)),
        )
    }
    leaves_shards = at["sharded"].index("allreduce")
    leaves_replicas = ROWS - at["replicated"][::-1].index("alltoall")

    assert leaves_shards > 1.3 * leaves_replicas
    assert at["sharded"] == sorted(at["sharded"], reverse=True)  # once on each way
    assert at["replicated"] == sorted(at["replicated"], reverse=True)


@given(st.integers(2, 6), st.integers(1, 200), st.integers(1, 200), st.integers(0, 10**6))
def test_ranks_have_as_much_in_common_with_other_numbers_of_rows(ranks: int, units: int, other: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(200, generator=random)[:units] for _ in range(ranks)]
    found = measure(ids, 200, 4, 8)

    same, moved = with_units(found, (units,) * ranks), with_units(found, (other,) * ranks)

    assert same.unions == pytest.approx(found.unions)
    assert moved.unions[0] == pytest.approx(other)
    assert all(other <= union <= min(200, k * other) + 1e-6 for k, union in enumerate(moved.unions, start=1))
    if units < 200:  # of a whole table, equal ranks and independent ones have the same union
        alike = with_units(measure([ids[0]] * ranks, 200, 4, 8), (other,) * ranks)
        assert alike.unions == pytest.approx((other,) * ranks)
