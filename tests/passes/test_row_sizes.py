"""What the sizes of exchanges are expected to be: each op's symbols have the number that its schema says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.passes.shard import ShardTables
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.sizes import UNKNOWN_SIZE, RowCounts, is_known
from tests.support.graphs import D, Tables, V, analysed, tables_model

TABLES = ("table.weight", "other.weight")
ROWS = {"table.weight": RowCounts(7, 11, 9), "other.weight": RowCounts(5, 10, 6)}
IDS = torch.arange(6).reshape(2, 3)


def both(model: Tables, ids: Tensor) -> Tensor:
    return (model.table(ids) * model.other(ids)).sum()


def sharded(rank: int = 0, grid: Grid | None = None, rows: dict[str, RowCounts] = ROWS) -> TrainingGraph:
    grids = {} if grid is None else dict.fromkeys(TABLES, grid)
    return ShardTables(TABLES, (), rank, 4 if grid else 2, grids, rows=rows)(analysed(tables_model(both), IDS))


def sizes_of(graph: TrainingGraph) -> dict[str, list[tuple[int, ...]]]:
    """Returns node -> the expected shapes of its results."""
    return {
        node.name: [
            tuple(map(graph.expected.number, tuple(leaf.shape)))
            for leaf in pytree.tree_leaves(node.meta.get("val"))
            if isinstance(leaf, Tensor)
        ]
        for node in graph.graph.nodes
    }


def test_a_grid_has_its_part_of_the_rows() -> None:
    found = sizes_of(sharded(rank=3, grid=Grid(2, 2)))
    d = D // 2
    assert found["table_route"] == [(6,), (4, 2), (7,)]
    assert found["table_columns"] == [(6, d)]
    assert found["table_table"] == [(7, D)]
    assert found["table_gradient"] == [(6 * d,)]
    assert found["table_update"] == [(5,), (5, d)]


@pytest.mark.parametrize("grid", [None, Grid(2, 2)])
def test_every_size_that_only_the_data_knows_is_expected(grid: Grid | None) -> None:
    graph = sharded(grid=grid, rows={})
    symbols = {
        str(symbol)
        for node in graph.graph.nodes
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(leaf, Tensor)
        for size in tuple(leaf.shape)
        if not is_known(size)
        for symbol in size.node.expr.free_symbols  # type: ignore[attr-defined]
    }
    assert symbols == set(graph.expected.by_symbol)
    # The size counts rows, so it is not UNKNOWN_SIZE // D.
    assert sizes_of(graph)["table_table"] == [(min(UNKNOWN_SIZE, V), D)]
