"""Tables that an output layer reads, with rows dealt out over ranks, train as in the single-process reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import embrace_fx
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.support.heads import OF_LOGITS, HeadWorkload, Predicts
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import (
    Way,
    expected_parameters,
    make_optimizers,
    train_compiled,
    whole_parameters,
)

DTYPE = torch.float64
STEPS = 7

CASES = {
    "tied": HeadWorkload(),
    "tied, bias, none": HeadWorkload(bias=True, reduction="none"),
    "untied, bias": HeadWorkload(tied=False, bias=True),
    "tied, capped, shifted": HeadWorkload(cap=2.0, shifts=True),
}


def _check(workload: HeadWorkload, ranks: int, optimizer: str, schedule: ScheduleName) -> None:
    workload = replace(workload, ranks=ranks)
    way = Way({workload.table: "vocabulary"}, schedule, steps=STEPS)
    expected = expected_parameters(ranks, workload, DTYPE, optimizer, steps=STEPS)
    for found in run_ranks(ranks, train_compiled, workload, DTYPE, optimizer, "exact", way):
        assert found.plan[workload.table].strategy == "vocabulary"
        assert_same(found.parameters, expected, DTYPE)


@pytest.mark.parametrize("case", CASES)
def test_training_equals_the_reference(case: str) -> None:
    _check(CASES[case], 2, "adamw", "2d")


@pytest.mark.parametrize(
    ("ranks", "optimizer", "schedule"),
    [(3, "sgd", "none"), (4, "adagrad", "2d"), (2, "sgd", "vertical"), (3, "adamw", "horizontal")],
)
def test_ranks_optimizers_and_schedules(ranks: int, optimizer: str, schedule: ScheduleName) -> None:
    _check(CASES["tied"], ranks, optimizer, schedule)


# ---- losses outside of the model ----


def _train_outside(
    rank: int, world_size: int, workload: HeadWorkload, loss: str, schedule: ScheduleName
) -> dict[str, Tensor]:
    model = workload.make(DTYPE, seed=rank)
    (optimizer,) = make_optimizers("adamw", model)
    compiled = embrace_fx.compile(model, strategy={workload.table: "vocabulary"}, schedule=schedule)
    for step in range(STEPS):
        words, labels = workload.batches(step, rank, 0)
        OF_LOGITS[loss](compiled(words, labels), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert compiled.plan[workload.table].strategy == "vocabulary"
    return whole_parameters(compiled)


def _train_alone(workload: HeadWorkload, loss: str) -> dict[str, Tensor]:
    model = workload.make(DTYPE, seed=0)
    (optimizer,) = make_optimizers("adamw", model)
    for step in range(STEPS):
        batches = [workload.batches(step, rank, 0) for rank in range(workload.ranks)]
        losses = [OF_LOGITS[loss](model(*batch), batch[1]) for batch in batches]
        (torch.stack(losses).sum() / workload.ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("loss", OF_LOGITS)
@pytest.mark.parametrize("case", ["tied", "untied, bias"])
def test_losses_outside_of_the_model(case: str, loss: str) -> None:
    workload = replace(CASES[case], kind=Predicts)
    expected = _train_alone(workload, loss)
    for found in run_ranks(2, _train_outside, workload, loss, "2d"):
        assert_same(found, expected, DTYPE)
