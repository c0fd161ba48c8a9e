"""Reducing gradients in buckets: every gradient becomes its mean, each bucket leaves as early as it can."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.passes.reduce import ReduceGradients
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.graph import Gradient, Parameter, TrainingGraph
from tests.support.golden import check_golden
from tests.support.graphs import (
    IDS,
    Tables,
    analysed,
    assert_equal_outputs,
    averaged,
    classifier,
    run_graph,
    tables_model,
    tangent,
    targets,
    text,
    verified,
)
from tests.support.ranks import run_ranks
from tests.support.table_cases import plain

Buckets = tuple[tuple[str, ...], ...]


def checked(graph: TrainingGraph, buckets: Buckets, world_size: int = 2) -> TrainingGraph:
    return verified(ReduceGradients(buckets, world_size), graph)


def test_golden() -> None:
    graph = analysed(classifier(), IDS)
    after = checked(graph, (("classify.bias", "classify.weight"), ("words.weight",)))
    check_golden("reduce_gradients", text(after.module))


def means_over_ranks(rank: int, world_size: int, buckets: Buckets) -> None:
    communicator = Communicator(dist.group.WORLD)
    model = tables_model(plain)
    batch = (IDS + rank) % 10
    graph = analysed(model, batch)
    found = run_graph(checked(graph, buckets, world_size), model, batch, communicator=communicator)
    names = {name for bucket in buckets for name in bucket}
    assert_equal_outputs(found, averaged(run_graph(graph, model, batch), names, communicator))


def test_values_on_three_ranks() -> None:
    run_ranks(3, means_over_ranks, (("table.weight", "linear.weight"),))


def bias_without_gradient(model: Tables, ids: Tensor) -> Tensor:
    return model.table(ids) + model.linear.bias.detach()


def one_rank_trains_no_bias(rank: int, world_size: int) -> tuple[list[str], Tensor]:
    model = tables_model(plain if rank else bias_without_gradient)
    graph = checked(analysed(model, IDS), (("linear.bias", "table.weight"),), world_size)
    found = run_graph(graph, model, IDS, communicator=Communicator(dist.group.WORLD))
    return targets(graph.graph), found[Gradient(Parameter("linear.bias"))]


def test_a_parameter_without_gradient_on_one_rank_takes_part_with_zeros() -> None:
    (first, mean), (second, same_mean) = run_ranks(2, one_rank_trains_no_bias)
    assert ("aten::zeros_like" in first, "aten::zeros_like" in second) == (True, False)
    assert torch.equal(mean, same_mean)
    own = tangent(torch.empty((*IDS.shape, 4), dtype=torch.float64))
    torch.testing.assert_close(mean, own.sum((0, 1)) / 2)


def test_no_buckets_leave_the_graph_itself() -> None:
    graph = analysed(tables_model(plain), IDS)
    assert ReduceGradients((), 2)(graph) is graph
