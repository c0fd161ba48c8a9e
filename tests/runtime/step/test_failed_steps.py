"""Errors in the middle of a step, on one rank alone: all ranks hear of it, nothing is applied, training goes on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import embrace_fx
from embrace_fx.passes.planner.asked_strategies import Strategy
from tests.support.failing import Armed, draw_batch, make_model, make_optimizer
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same, train_reference
from tests.support.training import whole_parameters


@dataclass(frozen=True)
class Fault:
    """What the ranks do in one step, and the errors or warnings that the other ranks must get."""

    by_rank: dict[int, str]
    others: str


WENT_ON = "this rank called the model again without a backward"
FAULTS = {
    2: Fault({1: "in the loss"}, f"PeerFailure: rank 1: .*{WENT_ON}"),
    4: Fault({0: "no backward"}, f"PeerFailure: rank 0: .*{WENT_ON}"),
    6: Fault({1: "forward"}, "PeerFailure: rank 1: MemoryError: none left in the forward"),
    8: Fault({0: "backward"}, "PeerFailure: rank 0: MemoryError: none left in the backward"),
    9: Fault({1: "label"}, "PeerFailure: rank 1: IndexError: Target 7 is out of bounds"),
    12: Fault({1: "forward", 0: "no backward"}, f"PeerFailure: rank 0: .*{WENT_ON}.*; rank 1: MemoryError"),
    14: Fault({0: "loader"}, "nothing"),
    16: Fault({1: "evaluation"}, "rank 1: MemoryError: none left in the forward"),
}
RAISED_BY = {
    "in the loss": "IndexError",
    "no backward": "All ranks abandoned the previous call",
    "forward": "MemoryError: none left in the forward.*All ranks raise this error",
    "backward": "MemoryError: none left in the backward.*All ranks raise this error",
    "label": "IndexError: Target 7.*All ranks raise this error",
    "loader": "LoaderError",
    "evaluation": "MemoryError",
}
STEPS = 19
GOOD = [step for step in range(STEPS) if step not in FAULTS or step in (14, 16)]


class LoaderError(Exception):
    pass


def read(rank: int, first: int, fails_at: int | None) -> Iterator[tuple[Tensor, ...]]:
    for step in range(first, STEPS):
        if step == fails_at:
            raise LoaderError
        yield draw_batch(step, rank)


class Training:
    """One rank's loop, which records the error or warning of each step."""

    def __init__(self, rank: int, options: dict[str, Any], ahead: bool) -> None:
        self.rank, self.ahead = rank, ahead
        plain = make_model()
        self.optimizer = make_optimizer(plain)
        self.model: Any = embrace_fx.compile(plain, optimizer=self.optimizer, **options)
        self.told: dict[int, str] = {}

    def run(self) -> None:
        fails_at = next((step for step, fault in FAULTS.items() if fault.by_rank.get(self.rank) == "loader"), None)
        batches = self._read(0, fails_at)
        for step in range(STEPS):
            try:
                batch = next(batches)
            except LoaderError as error:  # only this rank restarts its loader
                self._note(step, error)
                batches = self._read(step, None)
                batch = next(batches)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    self._step(step, batch)
                except Exception as error:
                    self._note(step, error)
            for each in warned:  # warnings about the previous step, after which this rank continued
                self.told[step - 1] = self.told.get(step - 1, "") + str(each.message)
            self.optimizer.zero_grad()

    def _read(self, first: int, fails_at: int | None) -> Iterator[tuple[Tensor, ...]]:
        batches = read(self.rank, first, fails_at)
        return iter(self.model.lookahead(batches)) if self.ahead else batches

    def _note(self, step: int, error: Exception) -> None:
        self.told[step] = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])

    def _step(self, step: int, batch: tuple[Tensor, ...]) -> None:
        fault = FAULTS.get(step)
        does = fault.by_rank.get(self.rank, "") if fault is not None else ""
        if fault is not None and "evaluation" in fault.by_rank.values():
            self._evaluate(step, batch, fails=does == "evaluation")
        Armed.where = does
        if does == "label":
            batch[-1][0] = 7
        loss = self.model(*batch)
        if does == "in the loss":
            raise IndexError("in the loss")
        if does != "no backward":
            loss.backward()
            self.optimizer.step()

    def _evaluate(self, step: int, batch: tuple[Tensor, ...], *, fails: bool) -> None:
        with torch.no_grad():
            self.model(*batch)  # the first call compiles the model
            Armed.where = "forward" if fails else None
            try:
                self.model(*batch)
            except MemoryError as error:
                self._note(step, error)


def train(rank: int, world_size: int, options: dict[str, Any], ahead: bool) -> tuple[dict[int, str], dict[str, Tensor]]:
    training = Training(rank, options, ahead)
    training.run()
    return training.told, whole_parameters(training.model)


def check(world_size: int, options: dict[str, Any], *, ahead: bool, evaluates_alone: bool = False) -> None:
    """Compares with the reference what ranks have trained and raised. With whole tables each rank evaluates alone."""
    batches = [[draw_batch(step, rank) for step in GOOD] for rank in range(world_size)]
    expected = train_reference(make_model, lambda model: [make_optimizer(model)], batches, len(GOOD))
    for rank, (told, parameters) in enumerate(run_ranks(world_size, train, options, ahead)):
        for step, fault in FAULTS.items():
            does = fault.by_rank.get(rank)
            wanted = fault.others if does is None else RAISED_BY[does]
            told_of = told.get(step - 1 if does == "loader" and ahead else step, "nothing")
            if "evaluation" in fault.by_rank.values():
                if does is None and evaluates_alone:
                    wanted = "nothing"
                told_of = told.get(step, "") + told.get(step - 1, "") or "nothing"  # the next call may warn instead
            assert re.search(wanted, told_of), (rank, step, told)
        assert_same(parameters, expected, torch.float64)


@pytest.mark.parametrize(
    ("strategy", "schedule", "ahead"), [("alltoall", "2d", True), (embrace_fx.Grid(2, 1), "none", False)], ids=str
)
def test_a_step_that_fails_on_one_rank_is_given_up_on_all_and_training_goes_on(
    strategy: Strategy, schedule: str, ahead: bool
) -> None:
    check(2, {"strategy": strategy, "schedule": schedule}, ahead=ahead)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "without"])
@pytest.mark.parametrize("schedule", ["2d", "vertical", "horizontal", "none"])
@pytest.mark.parametrize(
    ("world_size", "strategy"),
    [(2, "alltoall"), (2, "allreduce"), (2, embrace_fx.Grid(2, 1)), (3, "alltoall"), (2, {"words.weight": "zen"})],
    ids=str,
)
def test_whatever_the_schedule_and_the_strategy(
    world_size: int, strategy: Strategy, schedule: str, ahead: bool
) -> None:
    whole = strategy == "allreduce" or isinstance(strategy, dict)
    check(world_size, {"strategy": strategy, "schedule": schedule}, ahead=ahead, evaluates_alone=whole)
