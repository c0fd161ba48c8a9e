"""What a flow decides at the heads of forwards and backwards, by itself: one process, and a table that only listens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from embrace_fx.runtime.flow.next_batch import NextBatch
from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import PeerFailure
from embrace_fx.vocabulary.graph import Values
from embrace_fx.vocabulary.operation_id import IDS, OperationId
from embrace_fx.vocabulary.step_variant import BackwardVariant, ForwardVariant
from tests.support.flows import DELAYED, EARLY, LATE, PRIOR, ROWS, Listening, ids_program, listening_flow


class Steps:
    """Steps of a model with one table."""

    def __init__(self) -> None:
        self.warned = 0
        self.table = Listening()
        self.flow = listening_flow(self.table, self._warn)
        self.launcher = self.flow.launcher
        self.program = ids_program()
        self.values: Values = {}

    def _warn(self) -> None:
        self.warned += 1

    def look_ahead(self, *ids: int) -> NextBatch:
        leaves = [torch.tensor(ids)]
        return NextBatch(self.program, leaves, self.program.unique(leaves))

    def forward(
        self, batch: NextBatch, following: NextBatch | None = None, absent: Sequence[OperationId] = ()
    ) -> ForwardVariant:
        self.table.told.clear()
        self.values, variant = self.flow.begin_forward(self.program, batch._read, following, lambda _: absent)
        if variant.coming:
            self.flow.submit_ids()
        self.flow.end_forward()
        return variant

    def backward(self) -> BackwardVariant:
        variant = self.flow.next_backward(self.program, self.values)
        self.table.told.clear()
        self.flow.open_window(None, [])
        self.flow.begin_backward(self.program, variant)
        if variant.coming:
            self.flow.await_ids()
        self.flow.end_backward()
        return variant


@pytest.fixture
def steps() -> Iterator[Steps]:
    found = Steps()
    yield found
    found.launcher.close()


def test_steps_of_an_epoch_under_lookahead(steps: Steps) -> None:
    """The first has found nothing, the last leaves nothing; between them steps are steady."""
    first, second, third = steps.look_ahead(1, 2), steps.look_ahead(2, 3), steps.look_ahead(4)

    assert steps.forward(first, second) == ForwardVariant("whole", coming=True)
    assert steps.backward() == BackwardVariant(left=False, coming=True, cut=True)
    assert "cut for [2, 3]" in steps.table.told
    assert steps.forward(second, third) == ForwardVariant("cut", coming=True)
    assert steps.backward() == BackwardVariant(left=True, coming=True, cut=True)
    assert steps.forward(third) == ForwardVariant("cut", coming=False)
    assert steps.backward() == BackwardVariant(left=True, coming=False, cut=False)
    assert steps.warned == 0


def test_a_batch_that_is_looked_ahead_to_is_not_computed_again(steps: Steps) -> None:
    following = steps.look_ahead(2, 3)
    steps.forward(steps.look_ahead(1), following)
    steps.backward()

    steps.forward(following)

    assert steps.values is following.values


def test_another_batch_is_told_of_and_what_was_sent_for_the_other_one_is_forgotten(steps: Steps) -> None:
    steps.forward(steps.look_ahead(1), steps.look_ahead(2))
    steps.backward()

    assert steps.forward(steps.look_ahead(3)) == ForwardVariant("other", coming=False)
    assert steps.warned == 1
    assert "drop" in steps.table.told
    assert steps.values["ids"].tolist() == [3]


def test_a_batch_that_was_written_meanwhile_is_another_one(steps: Steps) -> None:
    following = steps.look_ahead(2)
    steps.forward(steps.look_ahead(1), following)
    steps.backward()
    following._read[0].fill_(5)

    assert steps.forward(following).arrives == "other"
    assert steps.values["ids"].tolist() == [5]


@pytest.mark.parametrize("holds", [True, False])
def test_parameters_that_were_handed_out_are_looked_at_before_early_rows_are_used(steps: Steps, holds: bool) -> None:
    following = steps.look_ahead(2)
    steps.forward(steps.look_ahead(1), following)
    steps.backward()
    steps.flow.apply()
    steps.flow.hand_out()
    steps.table.holds = holds

    assert steps.forward(following).arrives == ("cut" if holds else "other")
    assert "still_equal" in steps.table.told
    assert steps.warned == 0  # it is the batch that was looked ahead to


def test_where_gradients_are_to_be_summed_nothing_is_cut(steps: Steps) -> None:
    steps.forward(steps.look_ahead(1), steps.look_ahead(2))
    steps.table.splits = False

    assert steps.backward() == BackwardVariant(left=False, coming=True, cut=False)
    assert not any(told.startswith("cut for") for told in steps.table.told)


def test_what_no_node_applies_is_applied_at_the_head_of_a_backward(steps: Steps) -> None:
    """Delayed gradients are the nodes' where the backward before has left some."""
    first, second = steps.look_ahead(1), steps.look_ahead(2)
    steps.forward(first, second)
    steps.backward()
    assert "apply" in steps.table.told

    steps.forward(second, steps.look_ahead(3))
    steps.backward()
    assert "apply" not in steps.table.told


def test_what_a_phase_leaves_out_is_not_waited_for(steps: Steps) -> None:
    steps.forward(steps.look_ahead(1), absent=steps.launcher.absent([IDS], forward=True))

    assert steps.launcher.expects(IDS)
    assert not steps.launcher.expects(LATE)
    steps.flow.open_window(None, steps.launcher.absent([PRIOR], forward=False))
    assert [o for o in (EARLY, PRIOR, DELAYED) if steps.launcher.expects(o)] == [PRIOR]


def test_what_is_left_out_is_of_the_phase_itself() -> None:
    launcher = Launcher([EARLY, PRIOR, IDS, LATE], [IDS, LATE], LaunchQueue(Recorder()), Communicator(None))

    assert launcher.absent([LATE, PRIOR], forward=True) == (IDS,)
    assert launcher.absent([LATE, PRIOR], forward=False) == (EARLY,)
    launcher.close()


def test_an_id_outside_the_table_is_refused_at_its_turn_and_not_before(steps: Steps) -> None:
    bad = steps.look_ahead(2, ROWS)
    assert bad.sizes() == [-1]

    assert steps.forward(steps.look_ahead(1), bad).coming is False  # so it is not prepared
    steps.backward()
    with pytest.raises(PeerFailure, match=f"ids go from 0 to {ROWS - 1}"):
        steps.forward(bad)


@pytest.mark.parametrize("waiting", [True, False])
def test_gradients_that_no_step_has_taken_become_ordinary_ones(steps: Steps, waiting: bool) -> None:
    steps.table.waiting = waiting
    steps.table.told.clear()

    steps.flow.wait()

    assert ("wait" in steps.table.told) is waiting
