"""Sharding tables: what moves where in the graph, and that values stay the same, on one rank and on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.passes.shard import ShardTables
from embrace_fx.passes.sparse_gradients import SparseGradients
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.graph import Gradient, Parameter
from tests.support.golden import check_golden
from tests.support.graphs import (
    BAG,
    IDS,
    OFFSETS,
    Tables,
    analysed,
    assert_equal_outputs,
    averaged,
    own_part,
    run_graph,
    sharding,
    tables_model,
    targets,
    text,
    verified,
)
from tests.support.ranks import run_ranks
from tests.support.table_cases import LEGAL, bag, example, plain

TABLE = "table.weight"
BOTH = (TABLE, "other.weight")


@pytest.mark.parametrize("name", LEGAL)
def test_values_on_one_rank(name: str) -> None:
    (model, graph), args = example(name), LEGAL[name].args
    sharded = verified(sharding(TABLE), graph)
    assert_equal_outputs(run_graph(sharded, model, *args), run_graph(graph, model, *args))


def many_uses(model: Tables, ids: Tensor, offsets: Tensor) -> Any:
    """Two tables, three lookups of one, one of the other, a bag with weights, and ids that are computed."""
    words = model.table(ids) * model.table((ids + 1) % 10)
    tags = bag(model, ids, offsets, per_sample_weights=model.vector)
    places = model.other((torch.arange(ids.shape[0]) + ids[0]) % 10)
    return model.linear(words + places).sum() * tags.sum()


def own_batch(rank: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's batch. The ranks share some ids, and rank 1's first bag is empty."""
    return (BAG + 2 * rank) % 6, OFFSETS if rank != 1 else torch.tensor([0, 0, 3, 4])


def shards_compute_the_same(rank: int, world_size: int, dims: tuple[int, ...]) -> None:
    communicator = Communicator(dist.group.WORLD)
    batch = own_batch(rank)
    for dim in dims:
        model = tables_model(many_uses)
        model.table = torch.nn.Embedding(10, dim).double()
        model.other = torch.nn.Embedding(10, dim).double()
        model.linear = torch.nn.Linear(dim, 3).double()
        graph = analysed(model, *batch)
        sharded = verified(sharding(*BOTH, rank=rank, world_size=world_size), graph)

        whole = averaged(run_graph(graph, model, *batch), BOTH, communicator)
        found = run_graph(sharded, model, *batch, communicator=communicator)

        assert_equal_outputs(found, own_part(whole, BOTH, communicator))


def test_values_of_uneven_columns_on_two_ranks() -> None:
    run_ranks(2, shards_compute_the_same, (5, 1))


def test_golden_of_two_tables_one_of_them_with_padding_and_two_lookups() -> None:
    def forward(model: Tables, ids: Tensor) -> Tensor:
        pairs = model.table(ids) * model.table((ids + 1) % 10)
        return pairs + model.other(ids)

    graph = analysed(tables_model(forward, padding_idx=0), IDS)
    check_golden("shard_tables", text(verified(sharding(*BOTH, rank=1, world_size=2), graph).module))


def test_nothing_to_shard_leaves_the_graph_itself() -> None:
    graph = analysed(tables_model(plain), IDS)
    assert sharding()(graph) is graph


def test_a_forward_alone_sends_no_gradients() -> None:
    model = tables_model(plain)
    graph = analysed(model, IDS, train=False)
    sharded = verified(sharding(TABLE), graph)
    assert "embrace::all_to_all_gradients" not in targets(sharded.graph)
    assert_equal_outputs(run_graph(sharded, model, IDS), run_graph(graph, model, IDS))


def test_a_table_without_a_gradient_on_this_rank_gets_one_without_rows() -> None:
    model = tables_model(lambda m, x: m.table(x) + m.other(x).detach())
    graph = verified(SparseGradients(BOTH, BOTH), analysed(model, IDS))
    assert run_graph(graph, model, IDS)[Gradient(Parameter("other.weight"))]._nnz() == 0


def renormed(model: Tables, ids: Tensor) -> Any:
    return model.linear(model.table(ids)) + model.linear(model.table(ids + 1))


def replicas_rescale_the_same_rows(rank: int, world_size: int) -> Tensor:
    communicator = Communicator(dist.group.WORLD)
    model = tables_model(renormed, max_norm=0.5)
    batch = torch.tensor([[rank, 3 * rank]])
    graph = analysed(model, batch)
    rewritten = verified(ShardTables((), (TABLE,), rank, world_size), graph)
    alone = run_graph(graph, model, batch)
    together = run_graph(rewritten, model, batch, communicator=communicator)
    assert together.keys() == alone.keys()
    (weight,) = (value for role, value in together.items() if "Mutation" in str(role))
    return weight


def test_max_norm_rescales_on_every_rank_what_any_rank_reads() -> None:
    first, second = run_ranks(2, replicas_rescale_the_same_rows)
    assert torch.equal(first, second)
    norms = first.norm(dim=1)
    read = torch.zeros(10, dtype=torch.bool).index_fill_(0, torch.tensor([0, 1, 2, 3, 4]), True)
    assert bool((norms[read] <= 0.5 + 1e-6).all())
    assert bool((norms[~read] > 0.5).all())
