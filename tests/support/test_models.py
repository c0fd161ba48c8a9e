"""The suite's models: their batches are reproducible, vary where asked, and train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.models import MODELS, PADDING, Workload

WORKLOADS = pytest.mark.parametrize("workload", [w for _, w in MODELS], ids=[name for name, _ in MODELS])


def _varying(workload: Any) -> Workload:
    return replace(workload, vary=True)


@WORKLOADS
def test_varying_batches_differ_in_shape_between_steps_and_between_ranks(workload: Workload) -> None:
    varying = _varying(workload)
    over_steps = {tuple(varying.batches(step, 0, seed=0)[0].shape) for step in range(6)}
    over_ranks = {tuple(varying.batches(0, rank, seed=0)[0].shape) for rank in range(6)}
    assert min(len(over_steps), len(over_ranks)) > 3
    assert all(min(shape) >= 2 for shape in over_steps | over_ranks)


def test_padding_and_empty_bags_occur() -> None:
    workloads = dict(MODELS)
    tokens, _ = workloads["transformer_encoder"].batches(0, 0, seed=0)
    assert (tokens == PADDING).any()
    assert (tokens[0] != PADDING).all()
    empty = 0
    for step in range(5):
        _, tags, offsets, *_ = workloads["bag_recommender"].batches(step, 0, seed=0)
        sizes = torch.diff(offsets, append=torch.tensor([len(tags)]))
        assert offsets[0] == 0
        assert (sizes >= 0).all()
        empty += int((sizes == 0).sum())
    assert empty > 0
