"""Exchanging rows in the dtype they are used in: only where every use is cast, and with the same values forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from embrace_fx.passes.narrow import NarrowExchange, exchange_dtypes
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.graph import Gradient, Parameter, Result, TrainingGraph
from tests.support.golden import check_golden
from tests.support.graphs import (
    IDS,
    Tables,
    analysed,
    assert_equal_outputs,
    run_graph,
    sharding,
    table_of,
    text,
    verified,
)
from tests.support.graphs import tables_model as model_in_float64
from tests.support.ranks import run_ranks

TABLE = "table.weight"
HALF = torch.bfloat16


def tables_model(forward: Callable[..., Any], **options: Any) -> Tables:
    return model_in_float64(forward, **options).float()


def narrowed(graph: TrainingGraph) -> TrainingGraph:
    return verified(NarrowExchange(), sharding(TABLE, world_size=2)(graph), captured=graph)


def autocast(model: Tables, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=HALF):
        vectors: Tensor = model.linear(model.table(ids))
    return vectors.float().sum()


def cast(*dtypes: torch.dtype) -> Callable[[Tables, Tensor], Tensor]:
    """A forward with one lookup for each dtype, cast to it."""

    def forward(model: Tables, ids: Tensor) -> Tensor:
        sums = [model.table((ids + k) % 10).to(dtype).square().sum().float() for k, dtype in enumerate(dtypes)]
        return torch.stack(sums).sum()

    return forward


def used_twice(model: Tables, ids: Tensor) -> Tensor:
    vectors: Tensor = model.table(ids)
    return vectors.to(HALF).float() * vectors


def one_lookup_cast_twice(model: Tables, ids: Tensor) -> Tensor:
    """Its gradient is a sum in the wide dtype."""
    vectors: Tensor = model.table(ids)
    return vectors.to(HALF).sum() + vectors.to(HALF).square().sum()


def result_too(model: Tables, ids: Tensor) -> tuple[Tensor, Tensor]:
    vectors: Tensor = model.table(ids)
    return vectors.to(HALF), vectors


LEGAL = {
    "autocast": autocast,
    "one lookup": cast(HALF),
    "two lookups": cast(HALF, HALF),
    "half precision": cast(torch.float16),
    "two lookups of the same ids": lambda m, x: m.table(x).to(HALF).sum() + m.table(x).to(HALF).square().sum(),
    "without gradient": lambda m, x: m.table(x).detach().to(HALF) * m.vector[0].to(HALF),
}

ILLEGAL: dict[str, Callable[..., Any]] = {
    "no cast": lambda m, x: m.linear(m.table(x)),
    "a wider dtype": cast(torch.float64),
    "an integer": lambda m, x: m.table(x).detach().to(torch.int16) * m.vector[0],
    "a dtype that does not travel": lambda m, x: m.table(x).detach().to(torch.float8_e5m2).float() * m.vector[0],
    "casts that differ": cast(HALF, torch.float16),
    "one lookup cast, one not": cast(HALF, torch.float32),
    "a lookup used cast and as it is": used_twice,
    "one lookup cast twice": one_lookup_cast_twice,
    "a lookup that is a result": result_too,
    "a bag, which sums": lambda m, x: F.embedding_bag(x, m.weight, mode="sum").to(HALF).square().sum(),
    "cast after arithmetic": lambda m, x: (m.table(x) * 2).to(HALF),
}


@functools.cache
def legal(name: str) -> tuple[Tables, TrainingGraph]:
    """A model and its captured graph; tests read both, and write neither."""
    model = tables_model(LEGAL[name])
    return model, analysed(model, IDS)


@pytest.mark.parametrize("name", LEGAL)
def test_rows_travel_in_the_dtype_of_the_casts(name: str) -> None:
    _, graph = legal(name)
    dtype = exchange_dtypes(graph)[table_of(graph).parameter]
    after = narrowed(graph)
    launches = [n for n in after.graph.nodes if str(n.target).startswith("embrace.all_to_all")]
    assert dtype.itemsize == 2
    wide = {torch.float32} if dtype == torch.float16 else set()  # float16 sums could overflow
    assert {n.meta["val"].dtype for n in launches} == {dtype} | wide


@pytest.mark.parametrize("forward", ILLEGAL.values(), ids=ILLEGAL)
def test_anything_else_leaves_the_graph_itself(forward: Callable[..., Any]) -> None:
    graph = analysed(tables_model(forward), IDS)
    sharded = sharding(TABLE, world_size=2)(graph)
    assert NarrowExchange()(sharded) is sharded
    assert exchange_dtypes(graph)[table_of(graph).parameter] == torch.float32


@pytest.mark.parametrize("name", LEGAL)
def test_values(name: str) -> None:
    """Forward bit by bit; a row's gradient is rounded once, as a sum."""
    model, captured = legal(name)
    graph = sharding(TABLE)(captured)

    found, expected = run_graph(NarrowExchange()(graph), model, IDS), run_graph(graph, model, IDS)

    assert found.keys() == expected.keys()
    for role, value in expected.items():
        if isinstance(role, Result):
            assert torch.equal(found[role], value)
        elif role == Gradient(Parameter(TABLE)):
            assert found[role].dtype == torch.float32
            torch.testing.assert_close(found[role], value, rtol=2**-8, atol=0)
        else:
            torch.testing.assert_close(found[role], value)


def narrow_rows_cross_ranks(rank: int, world_size: int) -> None:
    communicator = Communicator(dist.group.WORLD)
    for forward in (LEGAL["one lookup"], LEGAL["half precision"]):
        model = tables_model(forward)
        batch = (IDS + rank) % 10
        sharded = sharding(TABLE, rank=rank, world_size=world_size)(analysed(model, batch))
        expected = run_graph(sharded, model, batch, communicator=communicator)
        found = run_graph(NarrowExchange()(sharded), model, batch, communicator=communicator)
        assert_equal_outputs(found, expected, tolerance=2**-7)
        assert torch.equal(found[Result(0)], expected[Result(0)])


def test_values_on_several_ranks() -> None:
    run_ranks(2, narrow_rows_cross_ranks)


def test_golden() -> None:
    graph = analysed(tables_model(autocast), IDS)  # a fresh graph, so that symbols get the numbers of the golden file
    check_golden("narrow_exchange", text(narrowed(graph).module))
