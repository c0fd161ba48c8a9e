"""A schedule whose measured steps are longer than predicted gives way to another; the shortest measured one stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import embrace_fx
from embrace_fx.passes.planner import decide as deciding
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.pricing import Findings
from embrace_fx.passes.planner.step_cost import Added, is_worth_trying
from embrace_fx.planning import scheduling
from embrace_fx.vocabulary.operation_id import BETWEEN, OWN_CODE
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import SCHEDULES
from tests.support.cases import long_but
from tests.support.planned import FACTS, TABLE, graph_of
from tests.support.ranks import run_ranks

ROWS, WIDTH, STEPS = 2000, 32, 45
PREDICTED = {"none": 10.0, "horizontal": 40.0, "vertical": 40.0, "2d": 9.0}
MEASURED = {"none": 30.0, "2d": 15.0}


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(ROWS, WIDTH, padding_idx=0), nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: Tensor, kinds: Tensor) -> Tensor:
        return torch.tanh(self.head(self.words(words) + self.kinds(kinds))).square().mean()


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    words, kinds = torch.randint(ROWS, (2, 64, 10), generator=random).unbind()
    return words, kinds


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.5),
    "adagrad": partial(Adagrad, lr=0.05, eps=1e-3),
    "adamw": partial(AdamW, lr=0.01, eps=1e-3),
}


def prices(*_: Any) -> dict[str, Added]:
    return {name: Added(ms, 0.0, 0.0) for name, ms in PREDICTED.items()}


def _trained(
    rank: int, world_size: int, kind: str, lookahead: bool
) -> tuple[list[str], tuple[str, ...], dict[str, Tensor], dict[str, Tensor]]:
    """Schedules in their order, the plan's history, and the parameters here and under DDP."""
    torch.manual_seed(0)
    plain = TwoTables()
    torch.manual_seed(0)
    model = TwoTables()
    batches = [batch(step, rank) for step in range(STEPS)]

    reference = DistributedDataParallel(plain)
    optimizer = OPTIMIZERS[kind](reference.parameters())
    for each in batches:
        optimizer.zero_grad()
        reference(*each).backward()
        optimizer.step()

    compiled = embrace_fx.compile(model, strategy={"*.weight": "alltoall", "head*": "allreduce"})
    optimizer = OPTIMIZERS[kind](compiled.parameters())
    profiled = scheduling.profile

    def as_measured(recording: Any) -> scheduling.Profile:
        found = profiled(recording)
        without_loop = {**found.compute_ms, BETWEEN: 0.0, OWN_CODE: 0.0}
        return replace(found, compute_ms=without_loop, step_ms=MEASURED[compiled.plan.schedule_name])

    schedules: list[str] = []
    with mock.patch.object(deciding, "prices", prices), mock.patch.object(scheduling, "profile", as_measured):
        for each in compiled.lookahead(batches) if lookahead else batches:
            optimizer.zero_grad()
            compiled(*each).backward()
            optimizer.step()
            if compiled.plan.schedule_name not in schedules[-1:]:
                schedules.append(compiled.plan.schedule_name)
    found = {name: each.clone() for name, each in embrace_fx.full_state_dict(compiled).items()}
    return schedules, compiled.plan.history, found, dict(plain.state_dict())


CASES = {f"{kind}, {'ahead' if ahead else 'in turn'}": (kind, ahead) for kind in OPTIMIZERS for ahead in (True, False)}


@pytest.mark.parametrize(("kind", "lookahead"), long_but(["adamw, ahead"], CASES))
def test_the_shortest_measured_schedule_stays(kind: str, lookahead: bool) -> None:
    for schedules, history, found, expected in run_ranks(2, _trained, kind, lookahead):
        assert schedules == ["2d", "none", "2d"]
        assert 'schedule "2d" -> "none": ' in history[-2]
        assert 'a step of "2d" 15.0, "none" 30.0 ms was measured' in history[-1]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_measured_steps_count_and_not_their_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = (replace(FACTS, name=TABLE, shape=(10, 4)),)
    auto = Findings(graph_of(1_000_000), facts, {TABLE: (120, 120)}, 2, schedule="auto")
    monkeypatch.setattr(deciding, "prices", prices)

    def chosen(current: Plan | None, **measured: float) -> str:
        steps = {name.removeprefix("_"): ms for name, ms in measured.items()}
        return decide(replace(auto, measured=steps), current=current, links_are="probed").schedule_name

    in_use = decide(replace(auto, schedule="2d"))
    assert set(PREDICTED) == set(SCHEDULES)
    assert chosen(in_use) == "2d"
    assert chosen(in_use, _2d=9.9) == "2d"
    assert chosen(in_use, _2d=15.0) == "none"
    assert chosen(in_use, _2d=15.0, none=30.0) == "2d"
    assert chosen(in_use, _2d=50.0, none=60.0) == "horizontal"


def test_a_schedule_of_more_work_is_not_tried_beside_a_measured_one_unless_it_is_about_as_short() -> None:
    price = {
        "none": Added(waits_ms=10.0, work_ms=20.0, compute_ms=70.0),  # 100 ms
        "horizontal": Added(waits_ms=5.0, work_ms=30.0, compute_ms=70.0),  # 105 ms
        "vertical": Added(waits_ms=8.0, work_ms=40.0, compute_ms=70.0),  # 118 ms
        "2d": Added(waits_ms=40.0, work_ms=10.0, compute_ms=70.0),  # 120 ms, with less work
    }

    def worth(**step_ms: float) -> list[str]:
        return [name for name in price if is_worth_trying(name, price, step_ms)]

    assert worth() == [*price]
    assert worth(none=300.0) == ["none", "horizontal", "2d"]


def test_futile_schedules_are_not_chosen_however_long_the_measured_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = (replace(FACTS, name=TABLE, shape=(10, 4)),)
    auto = Findings(graph_of(1_000_000), facts, {TABLE: (120, 120)}, 2, schedule="auto", measured={"none": 500.0})
    works = {"none": 0.0, "horizontal": 50.0, "vertical": 50.0, "2d": 50.0}
    monkeypatch.setattr(deciding, "prices", lambda *_: {name: Added(0.0, ms, 100.0) for name, ms in works.items()})

    plan = decide(auto, current=decide(replace(auto, schedule="none")), links_are="probed")

    assert plan.schedule_name == "none"
