"""The suite's models: their batches are reproducible, vary where asked, and train."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.models import MODELS, PADDING, Batch, Workload

WORKLOADS = pytest.mark.parametrize("workload", [w for _, w in MODELS], ids=[name for name, _ in MODELS])


def _varying(workload: Any) -> Workload:
    twin: Workload = replace(workload, vary=True)
    return twin


def _same(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@WORKLOADS
def test_a_batch_depends_on_step_rank_and_seed_alone(workload: Workload) -> None:
    batch = workload.batches(3, 1, seed=0)

    torch.manual_seed(17)
    assert _same(batch, workload.batches(3, 1, seed=0))
    for other in (workload.batches(4, 1, seed=0), workload.batches(3, 2, seed=0), workload.batches(3, 1, seed=1)):
        assert [x.shape for x in other] == [x.shape for x in batch]
        assert not _same(batch, other)


@WORKLOADS
def test_varying_batches_differ_in_shape_between_steps_and_between_ranks(workload: Workload) -> None:
    varying = _varying(workload)

    over_steps = {tuple(varying.batches(step, 0, seed=0)[0].shape) for step in range(6)}
    over_ranks = {tuple(varying.batches(0, rank, seed=0)[0].shape) for rank in range(6)}

    assert min(len(over_steps), len(over_ranks)) > 3
    assert all(min(shape) >= 2 for shape in over_steps | over_ranks)


@WORKLOADS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_model_is_reproducible_and_trains(workload: Workload, dtype: torch.dtype) -> None:
    model = _varying(workload).make(dtype, seed=0)
    again = workload.make(dtype, seed=0).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(12):
        loss = model(*workload.batches(0, 0, seed=0))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert loss.dtype == dtype
    assert loss.shape == ()
    assert losses[-1] < 0.9 * losses[0]


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


@pytest.mark.parametrize("name", ["transformer_encoder", "bag_recommender"])
def test_a_model_is_captured_without_a_graph_break(name: str) -> None:
    workload = dict(MODELS)[name]
    model = workload.make(torch.float64, seed=0)
    batch = workload.batches(0, 0, seed=0)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    torch.testing.assert_close(compiled(*batch), model(*batch))
