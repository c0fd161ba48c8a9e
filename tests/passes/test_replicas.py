"""`scale_grad_by_freq` with replicas: ids are counted over all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from embrace_fx.passes.replicas import GlobalFrequency
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.graph import Gradient, Parameter, TrainingGraph
from tests.support.golden import check_golden
from tests.support.graphs import IDS, Tables, analysed, averaged, run_graph, tables_model, tangent, text
from tests.support.ranks import run_ranks

TABLE = "table.weight"


def one_lookup(model: Tables, ids: Tensor) -> Any:
    return model.table(ids)


def two_lookups(model: Tables, ids: Tensor) -> Any:
    """Scaled, and each by its own counts."""
    own = F.embedding(ids, model.weight, scale_grad_by_freq=True)
    next_one = F.embedding((ids + 1) % 10, model.weight, padding_idx=0, scale_grad_by_freq=True)
    return model.linear(own * 2 + next_one)


def checked(graph: TrainingGraph, world_size: int) -> TrainingGraph:
    result = GlobalFrequency(world_size)(graph)
    verify(result, after="GlobalFrequency", captured=graph, previous=graph)
    return result


def test_golden() -> None:
    graph = analysed(tables_model(one_lookup, scale_grad_by_freq=True), IDS)
    before = text(graph.module)
    check_golden("global_frequency", text(checked(graph, 2).module))
    assert text(graph.module) == before


@pytest.mark.parametrize(("scaled", "world_size"), [(False, 2), (True, 1)], ids=["not scaled", "one rank"])
def test_nothing_to_count_leaves_the_graph_itself(scaled: bool, world_size: int) -> None:
    graph = analysed(tables_model(one_lookup, scale_grad_by_freq=scaled), IDS)
    assert GlobalFrequency(world_size)(graph) is graph


def gradients_of_one_great_batch(rank: int, world_size: int) -> None:
    """The sum over ranks is the gradient of one process on all batches together."""
    communicator = Communicator(dist.group.WORLD)
    model = tables_model(two_lookups)
    batches = [(IDS + 3 * r) % 10 for r in range(world_size)]
    graph = analysed(model, batches[rank])
    counted = run_graph(checked(graph, world_size), model, batches[rank], communicator=communicator)
    result = two_lookups(model, torch.cat(batches))
    tangents = torch.cat([tangent(each) for each in result.chunk(world_size)])
    (expected,) = torch.autograd.grad(result, model.weight, tangents)
    total = averaged(counted, [TABLE], communicator)[Gradient(Parameter(TABLE))] * world_size
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)


def test_values_on_several_ranks() -> None:
    run_ranks(3, gradients_of_one_great_batch)
