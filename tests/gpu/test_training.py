"""Trainings on GPUs equal the single-process reference on the CPU, as trainings over gloo do."""

from __future__ import annotations

import pytest
import torch

from embrace_fx.vocabulary.schedule import SCHEDULES, ScheduleName
from tests.gpu.needs import STEPS, gpus, trains_on_gpu
from tests.support.models import MODELS, Workload
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import expected_parameters

WORKLOADS: dict[str, Workload] = {
    "lstm": dict(MODELS)["two_table_lm"],
    "transformer": dict(MODELS)["transformer_encoder"],
    "recommender": dict(MODELS)["bag_recommender"],
}
TIMEOUT_S = 240.0

pytestmark = pytest.mark.timeout(300)


def check(model: str, ranks: int, schedule: ScheduleName, backend: str, gpus_used: int) -> None:
    workload = WORKLOADS[model]
    expected = expected_parameters(ranks, workload, torch.float64, "adagrad", "exact", STEPS)
    for found in run_ranks(ranks, trains_on_gpu, workload, schedule, backend, gpus_used, timeout_s=TIMEOUT_S):
        assert_same(found, expected, torch.float64)


@gpus(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", WORKLOADS)
def test_ranks_that_share_a_gpu_over_gloo(model: str, schedule: ScheduleName) -> None:
    check(model, 2, schedule, "gloo", 1)


@gpus(2)
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", WORKLOADS)
def test_ranks_with_a_gpu_each_over_nccl(model: str, schedule: ScheduleName, backend: str) -> None:
    check(model, 2, schedule, backend, 2)
