"""Any two of what trainings differ in, together: each ends with the parameters of the reference.

Models, ranks, optimizers, row updates, schedules, strategies, types, batches of one size or of many, with and without
lookahead. Where no sum has an order, on one rank and on two, every schedule ends in the bits of "none".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest
import torch

from embrace_fx.vocabulary.exactness import RowUpdates
from embrace_fx.vocabulary.plan import EXCHANGES, Grid
from embrace_fx.vocabulary.schedule import SCHEDULES, ScheduleName
from tests.support.lookups import LookupsWorkload, ManyUsesWorkload
from tests.support.models import MODELS, Workload
from tests.support.pairwise import pairwise
from tests.support.question_answering import QuestionAnsweringWorkload
from tests.support.ranks import reset_torch_state, run_ranks
from tests.support.reference import assert_same
from tests.support.training import OPTIMIZERS, Trained, Way, expected_parameters, train_compiled

pytestmark = pytest.mark.timeout(300)

STEPS = 12
WORKLOADS: Mapping[str, Workload] = {
    **dict(MODELS),
    "bert": QuestionAnsweringWorkload(),
    "many uses": ManyUsesWorkload(),
    "no ids on some ranks": LookupsWorkload(some_empty=True),
    "one id, nothing but padding": LookupsWorkload(padding_idx=7, only_id=7, some_empty=True),
    "a single id": LookupsWorkload(shape=(), id_dtype=torch.int32),
    "one column": LookupsWorkload(dim=1),
    "seven columns, ids in three dimensions": LookupsWorkload(dim=7, shape=(2, 3, 4), padding_idx=0),
}


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        strategy: as in `compile`, or "grid": two rows of ranks, or three.
        vary: batches of other sizes and lengths on every rank and in every step, where the model has such.
    """

    model: str = "two_table_lm"
    ranks: int = 2
    optimizer: str = "adagrad"
    row_updates: RowUpdates = "exact"
    schedule: ScheduleName = "2d"
    strategy: str = "alltoall"
    dtype: torch.dtype = torch.float64
    vary: bool = False
    lookahead: bool = True

    @property
    def workload(self) -> Workload:
        found: Any = WORKLOADS[self.model]
        return replace(found, vary=True) if self.vary and self.model in dict(MODELS) else found

    @property
    def asked(self) -> Any:
        if self.strategy != "grid":
            return self.strategy
        rows = self.ranks if self.ranks % 2 or self.model == "one column" else 2
        return "alltoall" if self.ranks == 1 else Grid(rows, self.ranks // rows)

    @property
    def expected_strategy(self) -> str:
        """The strategy of every table. A table that a matmul reads too is a replica."""
        shards = self.strategy in ("alltoall", "grid")
        return ("allreduce" if self.model == "tied_lm" else "alltoall") if shards else self.strategy

    def __str__(self) -> str:
        words = [f"{self.ranks} x {self.model}", self.optimizer, self.row_updates, self.schedule, self.strategy]
        told = {"float32": self.dtype == torch.float32, "vary": self.vary, "ahead": self.lookahead}
        return ", ".join([*words, *(word for word, is_so in told.items() if is_so)])


ALL = [
    Case(**values)
    for values in pairwise(
        {
            "model": [*WORKLOADS],
            "ranks": [1, 2, 3, 4],
            "optimizer": [*OPTIMIZERS],
            "row_updates": [*get_args(RowUpdates)],
            "schedule": [*SCHEDULES],
            "strategy": ["alltoall", "grid", "allreduce", *EXCHANGES],
            "dtype": [torch.float64, torch.float32],
            "vary": [False, True],
            "lookahead": [True, False],
        }
    )
]


def _train(rank: int, world_size: int, cases: list[Case]) -> list[Trained]:
    found = []
    for case in cases:
        reset_torch_state()
        way = Way(case.asked, case.schedule, case.lookahead, STEPS)
        found.append(train_compiled(rank, world_size, case.workload, case.dtype, case.optimizer, case.row_updates, way))
    return found


def _check(cases: list[Case], by_rank: list[list[Trained]]) -> None:
    for case, of_ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        expected = expected_parameters(case.ranks, case.workload, case.dtype, case.optimizer, case.row_updates, STEPS)
        for found in of_ranks:
            try:
                assert_same(found.parameters, expected, case.dtype)
                assert set(found.strategies.values()) == {case.expected_strategy}
            except AssertionError as error:
                error.add_note(f"after training {case}")
                raise


@pytest.mark.long
@pytest.mark.parametrize("case", ALL, ids=str)
def test_parameters_equal_the_reference_and_the_bits_of_the_naive_schedule(case: Case) -> None:
    cases = [case, replace(case, schedule="none", lookahead=False)]
    by_rank = run_ranks(case.ranks, _train, cases, timeout_s=280.0)
    _check(cases, by_rank)
    if case.ranks <= 2:
        for found, naive in by_rank:
            assert all(torch.equal(found.parameters[name], value) for name, value in naive.parameters.items())
