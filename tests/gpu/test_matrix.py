"""Trainings on devices equal the reference: any two properties together, on one, two and four devices."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.matrix import PAIRWISE, Case, farthest

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("case", PAIRWISE, ids=str)
def test_a_training_equals_the_reference(case: Case) -> None:
    if torch.cuda.device_count() < case.devices:
        pytest.skip(f"needs {case.devices} GPU(s), found {torch.cuda.device_count()}")
    distance = farthest(case)
    assert distance.is_right, distance
