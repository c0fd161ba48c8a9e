"""Who uses a parameter between steps finds its update applied; a step passes, and what it leaves is watched again."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.held import Held
from embrace_fx.runtime.tables.part import Part
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.pending_parameters import PendingUpdates, Updates


class Case:
    """A part of a table, and a dense parameter, with updates that may be pending."""

    def __init__(self) -> None:
        self._communicator = Communicator(None)
        layout = Layout.of_table("t", torch.Size((4, 2)), None, weakref.ref(self._communicator))
        self.held = Held(torch.zeros(4, 2))
        self.table = nn.Parameter(Part(self.held, layout), requires_grad=False)
        self.dense = nn.Parameter(torch.zeros(2))
        self.owed: list[nn.Parameter] = [self.table, self.dense]
        self.applied = 0
        self.pending = PendingUpdates()
        self.pending.watch((Updates(lambda: self.owed, self._apply, self.pending.lock),), list)

    def _apply(self) -> None:
        self.applied += 1
        self.owed = []

    def use(self, name: str) -> None:
        getattr(self, name).sum()


@pytest.fixture
def case() -> Case:
    return Case()


@pytest.mark.parametrize("name", ["table", "dense"])
@pytest.mark.parametrize("grows", [False, True])
def test_a_step_passes_and_a_use_behind_it_applies(case: Case, name: str, grows: bool) -> None:
    case.pending.open()
    with case.pending.closed(grows=grows):
        case.use(name)
        assert case.applied == 0

    case.use(name)

    assert case.applied == 1


def test_memory_that_someone_takes_in_a_step_and_keeps_is_found_at_its_end(case: Case) -> None:
    case.owed = [case.table]
    case.pending.open()
    with case.pending.closed(grows=False):
        kept = case.held.memory().view(-1)

    assert case.applied == 1, kept  # who holds it reads it unseen from here on


def test_what_a_step_has_not_let_grow_is_not_looked_at_again(case: Case) -> None:
    case.owed = [case.table]
    case.pending.open()
    case.owed = []  # would be watched no more

    with case.pending.closed(grows=False):
        pass
    case.use("table")

    assert case.applied == 1


def test_what_begins_to_be_owed_in_a_step_is_watched_behind_it(case: Case) -> None:
    owed, case.owed = case.owed, []
    case.pending.open()
    with case.pending.closed():
        case.owed = owed

    case.use("table")

    assert case.applied == 1


def test_nothing_is_watched_once_it_is_applied(case: Case) -> None:
    case.pending.open()
    case.pending.apply()

    case.use("table")
    case.use("dense")

    assert (case.applied, type(case.dense), case.held.on_use) == (1, nn.Parameter, None)
