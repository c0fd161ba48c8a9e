"""The four schedules train to the same parameters.

Every schedule x number of ranks x optimizer x model equals the single-process reference to 1e-9, and on one and two
ranks, where no sum has an order, the other schedules in all bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch

from embrace_fx.vocabulary.exactness import RowUpdates
from embrace_fx.vocabulary.schedule import SCHEDULES
from tests.support.models import MODELS, Workload
from tests.support.question_answering import QuestionAnsweringWorkload
from tests.support.ranks import reset_torch_state, run_ranks
from tests.support.reference import assert_same
from tests.support.training import Trained, Way, expected_parameters, train_compiled

DTYPE = torch.float64
STEPS = 30
TIMEOUT_S = 280.0

pytestmark = pytest.mark.timeout(300)

WORKLOADS: dict[str, Workload] = {
    "lstm": dict(MODELS)["two_table_lm"],
    "transformer": dict(MODELS)["transformer_encoder"],
    "bert": QuestionAnsweringWorkload(),
    "recommender": dict(MODELS)["bag_recommender"],
}
UPDATES: tuple[tuple[str, RowUpdates], ...] = (
    ("sgd", "exact"),
    ("adagrad", "exact"),
    ("sparse_adam", "exact"),
    ("adam", "lazy"),
    ("adam", "exact"),
)


@dataclass(frozen=True)
class Case:
    """What one visit to the ranks trains, under all schedules."""

    model: str
    world_size: int
    optimizer: str
    row_updates: RowUpdates

    def __str__(self) -> str:
        return f"{self.model}-{self.world_size}-{self.optimizer}-{self.row_updates}"


CASES = [
    pytest.param(Case(model, n, *update), id=f"{model}-{n}-{'-'.join(update)}")
    for model, n, update in product(WORKLOADS, (1, 2, 3, 4), UPDATES)
]


def _train_under_all(rank: int, world_size: int, case: Case) -> dict[str, Trained]:
    results: dict[str, Trained] = {}
    for schedule in SCHEDULES:
        reset_torch_state()
        way = Way(schedule=schedule, steps=STEPS)
        results[schedule] = train_compiled(
            rank, world_size, WORKLOADS[case.model], DTYPE, case.optimizer, case.row_updates, way
        )
    return results


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_every_schedule_trains_to_the_parameters_of_the_reference(case: Case) -> None:
    workload = WORKLOADS[case.model]
    expected = expected_parameters(case.world_size, workload, DTYPE, case.optimizer, case.row_updates, STEPS)

    for results in run_ranks(case.world_size, _train_under_all, case, timeout_s=TIMEOUT_S):
        for schedule, result in results.items():
            assert_same(result.parameters, expected, DTYPE)
            assert set(result.strategies.values()) == {"alltoall"}
            if case.world_size <= 2:
                for name, value in results["none"].parameters.items():
                    assert torch.equal(result.parameters[name], value), f"{name} under {schedule}"
