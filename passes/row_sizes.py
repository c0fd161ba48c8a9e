"""Estimates the sizes of a sharded graph's exchanges from the rows that its plan expects to be read.

Each size that an `embrace::` op of an exchange returns is a new symbol (`embrace_fx.vocabulary.ops`). Its meaning
follows from its op and launch, not from node names; later passes keep the symbols with their fake values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import argument, id_of
from embrace_fx.vocabulary.sizes import ExpectedSizes, RowCounts

embrace = torch.ops.embrace


def expected_sizes(graph: TrainingGraph, known: Mapping[str, RowCounts], world_size: int) -> ExpectedSizes:
    """Finds numbers for the symbols of a graph that `ShardTables` has just rewritten.

    Args:
        known: table -> its rows; other tables count as `RowCounts.unknown`.
    """
    tables = {table.parameter: table for table in graph.tables}
    rows = {name: known.get(name) or RowCounts.unknown(each.num_rows, world_size) for name, each in tables.items()}
    found = (*_of_ids(graph.graph, rows), *_of_rows(graph.graph, rows), *_of_gradients(graph.graph, rows))
    return ExpectedSizes({str(value.shape[0].node.expr): number for value, number in found})  # type: ignore[attr-defined]


_Found = Iterator[tuple[Tensor, int]]
"""(a fake value whose first size is a symbol, the number expected for that size)."""


def _of_ids(graph: fx.Graph, rows: Mapping[str, RowCounts]) -> _Found:
    for launch in graph.find_nodes(op="call_function", target=embrace.all_gather_ids.default):
        names: tuple[str, ...] = launch.meta["tables"]
        widest = len(names) + sum(rows[name].own for name in names)  # a rank sends its counts, then its ids, padded
        ranks: int = launch.args[3]
        yield launch.meta["val"], ranks * widest
        (wait,) = launch.users
        (unpacked,) = wait.users
        for k, (name, unique) in enumerate(zip(names, launch.args[0], strict=True)):
            yield unique.meta["val"], rows[name].own
            yield unpacked.meta["val"][2 * k], rows[name].all


def _of_rows(graph: fx.Graph, rows: Mapping[str, RowCounts]) -> _Found:
    for launch in graph.find_nodes(op="call_function", target=embrace.all_to_all_rows.default):
        read = rows[id_of(launch).what]
        embedding_dim: int = launch.args[2]
        yield launch.meta["val"], read.own * embedding_dim
        route = launch.args[1].all_input_nodes[0]
        if route.target is embrace.route_grid.default:
            looked_up, _, order = route.meta["val"]
            yield looked_up, _on_a_row(read.all, launch)
            yield order, read.own


def _of_gradients(graph: fx.Graph, rows: Mapping[str, RowCounts]) -> _Found:
    for launch in graph.find_nodes(op="call_function", target=embrace.all_to_all_gradients.default):
        read = rows[id_of(launch).what]
        (wait,) = launch.users
        (coalesced,) = wait.users
        columns: Any = coalesced.args[2]
        yield launch.meta["val"], _on_a_row(read.all, launch) * columns
        yield coalesced.meta["val"][0], _on_a_row(read.together, launch)


def _on_a_row(count: int, launch: fx.Node) -> int:
    """Counts how many of `count` rows one row of the launch's grid of ranks gets."""
    grid_rows: int = argument(launch, "grid_rows")
    return ceil(count / grid_rows)
