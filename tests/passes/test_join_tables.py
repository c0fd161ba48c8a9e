"""Joining the tables of a joined table: the same values, one lookup and one gradient where all are plain lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embrace_fx.capture import capture
from embrace_fx.passes.join_tables import JoinTables
from embrace_fx.passes.pipeline import with_tables
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.vocabulary.graph import Gradient, Parameter, TrainingGraph
from embrace_fx.vocabulary.joined_table import JoinedTable
from tests.support.cases import crossed
from tests.support.golden import check_golden
from tests.support.graphs import (
    BAG,
    IDS,
    OFFSETS,
    D,
    Outputs,
    Tables,
    V,
    analysed,
    assert_equal_outputs,
    run_graph,
    sharding,
    tables_model,
    targets,
    text,
    verified,
)
from tests.support.table_cases import bag

SPACE = JoinedTable.from_tables({"table.weight": V, "other.weight": V + 3})
OTHER_IDS = torch.tensor([[12, 0, 5], [5, 1, 12]])


def model_of(forward: Callable[..., Any]) -> Tables:
    model = tables_model(forward)
    model.other = nn.Embedding(V + 3, D).double()
    return model


def joined(model: Tables, *args: Tensor) -> tuple[TrainingGraph, TrainingGraph]:
    graph = analysed(model, *args)
    return graph, verified(JoinTables((SPACE,)), graph)


def below_each_other(model: Tables, outputs: Outputs) -> Outputs:
    """Outputs in which the gradients of both tables are one, as is the model's space from now on."""
    owner, name = SPACE.name.split(".")
    space = nn.Parameter(torch.cat([model.table.weight.detach(), model.other.weight.detach()]))
    getattr(model, owner).register_parameter(name, space)
    of_tables = [Gradient(Parameter(each)) for each in SPACE.tables]
    if of_tables[0] in outputs:
        outputs = {**outputs, Gradient(Parameter(SPACE.name)): torch.cat([outputs[each] for each in of_tables])}
    return {role: value for role, value in outputs.items() if role not in of_tables}


def both(model: Tables, ids: Tensor, others: Tensor) -> Tensor:
    return model.linear(model.table(ids)) * model.other(others)


def without_gradient(model: Tables, ids: Tensor, others: Tensor) -> Tensor:
    with torch.no_grad():
        scale: Tensor = model.table(others % V).sum()
    return both(model, ids, others).mul(scale)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "one lookup of each": (both, (IDS, OTHER_IDS)),
    "the same ids": (lambda m, x: m.table(x) * m.other(x), (IDS,)),
    "one dimension": (both, (IDS[0], OTHER_IDS[0])),
    "sizes that differ": (lambda m, x, y: m.table(x).sum(1) * m.other(y), (IDS, OTHER_IDS[:, 0])),
    "a single id": (lambda m, x, y: m.table(x) * m.other(y), (IDS[0, 0], OTHER_IDS)),
    "three lookups": (lambda m, x, y: m.table(x) * m.other(y) + m.table((x + 1) % V), (IDS, OTHER_IDS)),
    "a lookup repeated": (
        lambda m, x, y: m.table(x) * m.other(y) - 2 * m.table(x) * m.other((y + 1) % V),
        (IDS, OTHER_IDS),
    ),
    "a lookup repeated three times": (
        lambda m, x, y: m.table(x) * m.linear(m.table(x)) * m.other(y) * m.table(x),
        (IDS, OTHER_IDS),
    ),
    "a lookup repeated without gradient": (
        lambda m, x, y: m.table(x).detach() * m.table(x) * m.other(y),
        (IDS, OTHER_IDS),
    ),
    "int32 ids beside int64": (both, (IDS.int(), OTHER_IDS)),
    "int32 ids": (both, (IDS.int(), OTHER_IDS.int())),
    "no ids of one": (lambda m, x, y: m.table(x).sum() + m.other(y).sum(), (IDS, OTHER_IDS[:0])),
    "no ids": (both, (IDS[:0], OTHER_IDS[:0])),
    "a lookup without gradient": (without_gradient, (IDS, OTHER_IDS)),
    "ids computed from ids": (lambda m, x, y: both(m, (x * 3 + y) % V, (x + y) % V), (IDS, OTHER_IDS)),
    "a bag": (lambda m, x, o, y: bag(m, x, o).sum() * m.other(y), (BAG, OFFSETS, OTHER_IDS)),
    "a bag of rows": (lambda m, x, y: bag(m, x, mode="mean") * m.other(y)[:, 0], (IDS, OTHER_IDS)),
    "a bag's maximum": (lambda m, x, y: bag(m, x, mode="max") * m.other(y)[:, 0], (IDS, OTHER_IDS)),
    "a weighted bag": (
        lambda m, x, o, y: bag(m, x, o, per_sample_weights=m.vector).sum() * m.other(y),
        (BAG, OFFSETS, OTHER_IDS),
    ),
    "bags alone": (
        lambda m, x, y: bag(m, x) * nn.functional.embedding_bag(y, m.other.weight, mode="sum"),
        (IDS, OTHER_IDS),
    ),
}


@pytest.mark.parametrize(("name", "shards"), crossed([*CASES], [False, True]))
def test_values(name: str, shards: bool) -> None:
    forward, args = CASES[name]
    model = model_of(forward)
    before, after = joined(model, *args)
    expected = below_each_other(model, run_graph(before, model, *args))
    after = sharding(SPACE.name)(after) if shards else after
    assert_equal_outputs(run_graph(after, model, *args), expected)


PADDED = JoinedTable.from_tables({"table.weight": V, "other.weight": V + 3}, {"table.weight": 2, "other.weight": 5})


@pytest.mark.parametrize("name", [name for name in CASES if "bag" not in name])
def test_padding_rows_get_no_gradient(name: str) -> None:
    forward, args = CASES[name]
    model = tables_model(forward, padding_idx=2)
    model.other = nn.Embedding(V + 3, D, padding_idx=5).double()
    before = analysed(model, *args)
    expected = below_each_other(model, run_graph(before, model, *args))
    after = sharding(SPACE.name)(JoinTables((PADDED,))(before))
    verify(after, after="ShardTables", captured=before, previous=before)
    assert_equal_outputs(run_graph(after, model, *args), expected)


def pairs(model: Tables, ids: Tensor, others: Tensor) -> Tensor:
    return model.table(ids[:, :1] * ids[:, 0] % V).mean(0) * model.other(others[:, 0])


@pytest.mark.parametrize("forward", [both, pairs])
def test_values_of_a_batch_of_another_size(forward: Callable[..., Any]) -> None:
    model, shorter = model_of(lambda *args: forward(*args).sum()), (IDS[:1], OTHER_IDS[:1])
    captured = capture(model, (IDS, OTHER_IDS), {}, train=True, dynamic=frozenset({(0, 0), (1, 0)}))
    graph = with_tables(captured.graph)
    joined = verified(JoinTables((SPACE,)), graph)
    expected = below_each_other(model, run_graph(graph, model, *shorter))
    assert_equal_outputs(run_graph(joined, model, *shorter), expected)


def test_lookups_that_are_all_cast_are_cast_as_one() -> None:
    def forward(model: Tables, ids: Tensor, others: Tensor) -> Tensor:
        return (model.table(ids).bfloat16() * model.other(others).bfloat16()).double()

    model = model_of(forward)
    before, after = joined(model, IDS, OTHER_IDS)
    expected = below_each_other(model, run_graph(before, model, IDS, OTHER_IDS))
    assert targets(after.graph).count("aten::_to_copy") == 4  # two for the product, one for rows, one for gradients
    assert_equal_outputs(run_graph(after, model, IDS, OTHER_IDS), expected)


def test_golden_of_two_tables() -> None:
    graph = analysed(model_of(both), IDS, OTHER_IDS)
    check_golden("join_tables", text(verified(JoinTables((SPACE,)), graph).module))


def test_a_graph_that_reads_none_of_the_tables_is_unchanged() -> None:
    graph = analysed(tables_model(lambda m, x: m.linear(x)), torch.ones(1, 4).double())
    assert JoinTables((SPACE,))(graph) is graph
