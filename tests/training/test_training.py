"""Every model x optimizer x row updates x number of ranks x dtype trains to the parameters of the reference.

One group (model, ranks, dtype) runs all of its optimizers in a single visit to the ranks. One group runs by default,
with three of them; other models and three ranks come with the default cases of the schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import get_args

import pytest
import torch

from embrace_fx.vocabulary.exactness import RowUpdates
from tests.support.models import MODELS, Workload
from tests.support.ranks import reset_torch_state, run_ranks
from tests.support.reference import assert_same
from tests.support.training import OPTIMIZERS, Trained, expected_parameters, train_compiled

WORKLOADS = dict(MODELS)
CASES: tuple[tuple[str, RowUpdates], ...] = tuple(product(OPTIMIZERS, get_args(RowUpdates)))
TIMEOUT_S = 280.0
"""For twelve trainings on up to four ranks, which may have to share two cores with other work."""

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Group:
    """What one visit to the ranks trains, by all optimizers."""

    model: str
    world_size: int
    dtype: torch.dtype

    @property
    def cases(self) -> tuple[tuple[str, RowUpdates], ...]:
        """What is trained; by default as scenarios do not: they train every optimizer, and no row lazily."""
        return CASES if self not in DEFAULT else (("adagrad", "exact"), ("adamw", "exact"), ("adamw", "lazy"))

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.model]

    def __str__(self) -> str:
        return f"{self.model}-{self.world_size}-{str(self.dtype).removeprefix('torch.')}"


GROUPS = tuple(Group(*g) for g in product(WORKLOADS, (1, 2, 3, 4), (torch.float64, torch.float32)))
DEFAULT = frozenset(
    {
        Group("two_table_lm", 2, torch.float64),
    }
)


def _train_all(rank: int, world_size: int, group: Group) -> dict[tuple[str, RowUpdates], Trained]:
    results = {}
    for optimizer, row_updates in group.cases:
        reset_torch_state()
        try:
            results[optimizer, row_updates] = train_compiled(
                rank, world_size, group.workload, group.dtype, optimizer, row_updates
            )
        except Exception as error:
            error.add_note(f"while training {group} with {optimizer}, {row_updates}")
            raise
    return results


@pytest.mark.parametrize(
    "group", [pytest.param(g, id=str(g), marks=() if g in DEFAULT else pytest.mark.long) for g in GROUPS]
)
def test_parameters_equal_the_reference_and_tables_are_where_they_should_be(group: Group) -> None:
    """All optimizers in one visit: two tests would have two workers train them."""
    by_rank = run_ranks(group.world_size, _train_all, group, timeout_s=TIMEOUT_S)
    if group.model == "tied_lm":
        strategy, reason = "allreduce", "also read densely"
    else:
        strategy, reason = "alltoall", "asked for"
    for optimizer, row_updates in group.cases:
        expected = expected_parameters(group.world_size, group.workload, group.dtype, optimizer, row_updates)
        for results in by_rank:
            found = results[optimizer, row_updates]
            try:
                assert_same(found.parameters, expected, group.dtype)
            except AssertionError as error:
                error.add_note(f"after training with {optimizer}, {row_updates}")
                raise
            decisions = [each for each in found.plan.values() if each.is_table]
            assert decisions
            for decision in decisions:
                assert decision.strategy == strategy, (decision, optimizer, row_updates)
                assert reason in decision.reason
