"""A model's programs before anything is captured, and at its end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import embrace_fx
from embrace_fx.planning.fitting import PlanViolation
from embrace_fx.runtime.ranks.failure import PlanDoesNotFit
from embrace_fx.session.session import Session


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
    return embrace_fx.compile(Words())._session


def test_a_batch_that_lacks_nothing_goes_on_and_another_asks_for_a_change(session: Session) -> None:
    session.programs.check_fit(PlanViolation(), 0)

    with pytest.raises(PlanDoesNotFit):
        session.programs.check_fit(PlanViolation(late=("layer.bias",)), 0)


def test_before_the_first_call_there_is_nothing(session: Session) -> None:
    assert session.programs.plan is None
    assert session.programs.flow is None
    assert session.shards == ()
    assert not session.is_training
    session.programs.synchronize()
    session.parameters_may_change()


def test_what_a_call_is_for_is_told_by_gradients_and_no_sync(session: Session) -> None:
    found = [session._context.activity(train=train) for train in (True, False)]
    session.state.synchronised = False

    assert len({*found, session._context.activity(train=True)}) == 3
    assert session._context.activity(train=False) == found[1]


def test_a_closed_session_takes_no_call(session: Session) -> None:
    session.close()

    with pytest.raises(RuntimeError, match="close"):
        session.call((torch.tensor([1]),), {})
