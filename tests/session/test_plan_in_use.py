"""The plan in use, and the session around it, on one process and before anything is captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import embrace_fx
from embrace_fx.planning.fitting import Misfit
from embrace_fx.planning.replanning import SAMPLED_EVERY, Drift
from embrace_fx.runtime.ranks.failure import PeerFailure, PlanDoesNotFit
from embrace_fx.session.calls import Kind, Variant
from embrace_fx.session.session import Session
from embrace_fx.vocabulary.plan import Decision, Plan
from tests.support.inside import session_of, setting_of


class Words(nn.Module):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.table(ids)).sum()
        return found


@pytest.fixture
def session() -> Session:
    return cast(Session, session_of(embrace_fx.compile(Words())))


def variant(*, train: bool = True, tables: tuple[str, ...] = ("table.weight",)) -> Variant:
    """A capture of which nothing is asked but its tables."""
    analysed = SimpleNamespace(tables=[SimpleNamespace(parameter=name) for name in tables])
    return Variant(cast(Any, None), cast(Any, analysed), train)


PLAN = Plan(1, (Decision("table.weight", (10, 4), True, "alltoall", "asked for", 0, 0, 0.0),), ())


# -- whether a plan fits -----------------------------------------------------------------------------------------------


def test_a_batch_that_lacks_nothing_goes_on_and_another_asks_for_a_change(session: Session) -> None:
    session.planned.fits(Misfit(), 0)

    with pytest.raises(PlanDoesNotFit):
        session.planned.fits(Misfit(late=("layer.bias",)), 0)


def test_a_call_begins_anew_once_the_plan_has_been_changed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def call(*_: object) -> str:
        session.planned.calls.count += 1
        told.append("called")
        if len(told) == 1:
            raise PlanDoesNotFit
        return "results"

    monkeypatch.setattr(session, "_call", call)
    monkeypatch.setattr(session.planned, "fit", lambda: told.append("fitted"))

    assert session.call((torch.tensor([1]),), {}) == "results"
    assert told == ["called", "fitted", "called"]
    assert session.planned.calls.count == 1  # the call that was given up is not one


def test_a_plan_is_not_changed_while_a_backward_is_to_come(session: Session) -> None:
    call = nn.Identity()  # anything that can be referred to weakly
    session.state.awaiting_backward.add(call)
    session.planned.plan = PLAN

    with pytest.raises(PeerFailure, match="an earlier call's backward is still to come"):
        session.planned.fit()


# -- whether another one may take its place ----------------------------------------------------------------------------


def may_change(session: Session, of: Variant) -> bool:
    session.planned.plan = PLAN
    return session.planned._may_change(of)


def test_between_two_steps_it_may(session: Session) -> None:
    assert may_change(session, variant())


def test_in_an_evaluation_and_of_a_call_with_other_tables_it_may_not(session: Session) -> None:
    assert not may_change(session, variant(train=False))
    assert not may_change(session, variant(tables=()))


def test_while_a_sum_is_half_made_it_may_not(session: Session) -> None:
    session.state.unreduced.add("layer.bias")

    assert not may_change(session, variant())


def test_an_optimizer_that_needs_a_table_whole_is_refused_where_the_plan_cannot_be_changed(session: Session) -> None:
    cast(Any, session.planned)._kinds["kind"] = Kind(variants=[variant()])
    session.planned.plan = PLAN
    session.state.unreduced.add("layer.bias")

    with pytest.raises(RuntimeError, match=r"expected an element-wise optimizer.*table\.weight cannot be put together"):
        session.planned.make_whole(["table.weight"], "its norms are of whole tables")


# -- what is followed from step to step --------------------------------------------------------------------------------


def test_batches_are_sampled_and_the_wish_is_passed_on(session: Session) -> None:
    seen: list[object] = []

    class Following:
        wants_plan = False

        def observe(self, rows: object) -> None:
            seen.append(rows)
            self.wants_plan = len(seen) == 2

    session.planned._drift = cast(Drift, Following())
    asked = []
    for count in range(1, 2 * SAMPLED_EVERY + 1):
        session.planned.calls.count = count
        session.planned.observe()
        asked.append(session.planned.calls.asks_to_plan)

    assert len(seen) == 2
    assert asked == [False] * (2 * SAMPLED_EVERY - 1) + [True]


# -- before the first call ---------------------------------------------------------------------------------------------


def test_before_the_first_call_there_is_nothing(session: Session) -> None:
    assert session.planned.flow is None
    assert session.planned.builder is None
    assert session.shards == ()
    assert not session.is_training
    session.planned.synchronize()
    session.parameters_may_change()


def test_what_a_call_is_for_is_told_by_gradients_and_no_sync(session: Session) -> None:
    found = [setting_of(session).activity(train=train) for train in (True, False)]
    session.state.synchronised = False

    assert len({*found, setting_of(session).activity(train=True)}) == 3
    assert setting_of(session).activity(train=False) == found[1]
    assert session.state.synchronised is False


def test_a_closed_session_takes_no_call(session: Session) -> None:
    session.close()

    with pytest.raises(RuntimeError, match="close"):
        session.call((torch.tensor([1]),), {})
