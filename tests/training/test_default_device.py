"""A default device is the forward's own: what the library makes for itself lies where it belongs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import embrace_fx
from tests.support.models import MODELS
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import SEED, expected_parameters, make_optimizers, whole_parameters

STEPS = 4
WORKLOAD = dict(MODELS)["bag_recommender"]


def trains_under_another_default(rank: int, world_size: int) -> dict[str, Tensor]:
    model = WORKLOAD.make(torch.float64, seed=SEED + rank)
    optimizers = make_optimizers("adagrad", model)
    batches = [WORKLOAD.batches(step, rank, SEED) for step in range(STEPS)]
    with torch.device("meta"):  # a default device that cannot compute
        compiled = embrace_fx.compile(model, optimizer=optimizers, strategy="alltoall")
        for batch in compiled.lookahead(batches):
            compiled(*batch).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    return whole_parameters(compiled)


@pytest.mark.long
def test_a_default_device_changes_nothing() -> None:
    expected = expected_parameters(2, WORKLOAD, torch.float64, "adagrad", "exact", STEPS)
    for found in run_ranks(2, trains_under_another_default):
        assert_same(found, expected, torch.float64)
