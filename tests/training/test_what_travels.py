"""What travels is what the graphs say: the transfers of each step are the submissions of the graphs that it runs.

The same launches by the same ids, and in each class in the order of the schedule: in steps between two others, at the
beginning and the end of an epoch, where another batch comes than was looked ahead to, where gradients are summed up.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch import Tensor

import embrace_fx
from embrace_fx.runtime.step.program import Program
from embrace_fx.vocabulary.operation_id import IDS, OperationId
from embrace_fx.vocabulary.schedule import SCHEDULES, ScheduleName
from embrace_fx.vocabulary.step_variant import VARIANTS
from embrace_fx.vocabulary.submissions import submitted
from tests.support.inside import session_of
from tests.support.models import MODELS
from tests.support.ranks import reset_torch_state, run_ranks
from tests.support.training import SEED, make_optimizers

Way = tuple[ScheduleName, bool]
"""A schedule, and whether batches are looked ahead to."""


@dataclass
class Window:
    """A backward, and what follows on it up to the next one.

    Attributes:
        phases: names of the graphs that ran.
        submits: what they submit, in the order of the program.
        transfers: what was launched, as it was.
    """

    phases: list[str] = field(default_factory=list)
    submits: list[OperationId] = field(default_factory=list)
    transfers: list[OperationId] = field(default_factory=list)


@dataclass(frozen=True)
class Seen:
    """One rank's steps under one schedule.

    Attributes:
        windows: all that are whole.
        order: of the schedule.
    """

    windows: list[Window]
    order: tuple[OperationId, ...]


class Training:
    """A compiled model whose phases are noted as they run."""

    def __init__(self, rank: int, model: str, way: Way) -> None:
        reset_torch_state()
        schedule, self._looks_ahead = way
        workload = dict(MODELS)[model]
        module = workload.make(torch.float32, SEED)
        optimizers = make_optimizers("adagrad", module)
        self.compiled = embrace_fx.compile(module, optimizer=optimizers, strategy="alltoall", schedule=schedule)
        self._batch = partial(workload.batches, rank=rank, seed=SEED)
        self._number = 0
        self.windows: list[Window] = []

    def batches(self, count: int) -> list[tuple[Tensor, ...]]:
        self._number += count
        return [self._batch(step) for step in range(self._number - count, self._number)]

    def epoch(self, count: int) -> Any:
        found = self.batches(count)
        return self.compiled.lookahead(found) if self._looks_ahead else iter(found)

    def step(self, batches: Iterable[tuple[Tensor, ...]]) -> None:
        """One step of the optimizers, for the sum of the batches' gradients."""
        for batch in batches:
            self.compiled(*batch).backward()
        for each in self.compiled.optimizer:
            each.step()
            each.zero_grad()

    def noting(self, phase: Callable[..., Any]) -> Callable[..., Any]:
        """`Program.phase`, which tells what runs next."""

        def noted(program: Program, variant: Any) -> Any:
            name = variant.phase if program.variants is None else str(variant)
            if variant.phase == "backward":
                self.windows.append(Window())
            if self.windows and (not self.windows[-1].phases or self.windows[-1].phases[-1] != name):
                self.windows[-1].phases.append(name)
            return phase(program, variant)

        return noted


def _trains(rank: int, world_size: int, model: str, ways: list[Way]) -> dict[Way, Seen]:
    return {way: _train(Training(rank, model, way)) for way in ways}


def _train(training: Training) -> Seen:
    compiled = training.compiled
    training.step(training.batches(1))
    flow = session_of(compiled).programs.flow
    assert flow is not None
    recording = flow.recorder.start()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of another batch
        patch.setattr(Program, "phase", training.noting(Program.phase))
        _epochs(training)
    compiled.synchronize()
    flow.launcher.close()  # all that was submitted has completed, and is told
    flow.recorder.stop()
    for number, window in enumerate(training.windows):
        sent = [each for each in recording.transfers if each.window == number]
        window.transfers = [each.launch for each in sorted(sent, key=lambda each: each.started_s)]
        window.submits = [each for phase in window.phases for each in submitted(compiled.graphs[phase])]
    return Seen(training.windows[:-1], compiled.schedule.launches)


def _epochs(training: Training) -> None:
    """What users do between and within epochs."""
    for batch in training.epoch(5):  # the first step, steady ones, the last
        training.step([batch])
    for batch in training.epoch(1):  # an epoch of one batch
        training.step([batch])
    for number, batch in enumerate(training.epoch(6)):
        training.step([batch])
        if number == 1:  # another batch
            training.step(training.batches(1))
        if number == 3:  # the rows that left early are no longer those of the tables
            with torch.no_grad():
                for parameter in training.compiled.parameters():
                    parameter.mul_(0.99)
    coming = training.epoch(6)
    training.step(islice(coming, 4))  # gradients are summed up
    for batch in coming:
        training.step([batch])
    training.step(training.batches(1))


ALL: list[Way] = list(product(SCHEDULES, (True, False)))
CASES = [
    pytest.param(model, n, ALL, id=f"{model}-{n}")
    for model, n in product(("two_table_lm", "transformer_encoder", "bag_recommender"), (2, 3, 4))
]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("model", "world_size", "ways"), CASES)
def test_transfers_are_the_submissions_of_the_graphs_that_run(model: str, world_size: int, ways: list[Way]) -> None:
    for found in run_ranks(world_size, _trains, model, ways, timeout_s=280.0):
        for (schedule, lookahead), seen in found.items():
            for window in seen.windows:
                _check(window, seen.order)
            ran = {phase for window in seen.windows for phase in window.phases}
            if schedule not in ("vertical", "2d"):
                assert ran == {"forward", "backward"}
            elif lookahead:
                assert ran == set(map(str, VARIANTS)), schedule
            else:
                assert {"forward, rows whole, none coming", "backward, nothing left, none coming"} == ran
            assert any(IDS in window.transfers for window in seen.windows) == (
                lookahead and schedule in ("vertical", "2d")
            )


def _check(window: Window, order: Sequence[OperationId]) -> None:
    assert Counter(window.transfers) == Counter(window.submits), window.phases
    for lane in {launch.lane for launch in window.submits}:
        in_order = [launch for launch in order if launch.lane == lane and launch in window.submits]
        assert [launch for launch in window.transfers if launch.lane == lane] == in_order, (window.phases, lane)
