"""Plans of a model with two tables, of any size."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embrace_fx.cost.sparsity import Sparsity
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.pricing import Findings, ParameterFacts
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan
from tests.support.graphs import IDS, Tables, analysed, table_of, tables_model

TABLE, OTHER = "table.weight", "other.weight"
FACTS = ParameterFacts("", (), 8, trainable=True, used=True, row_update_blocker=None)


def two_tables(model: Tables, ids: Tensor) -> Any:
    return model.linear(model.table(ids) + model.other(torch.arange(3)))


@functools.cache
def graph_of(rows: int) -> TrainingGraph:
    """The graph of `two_tables`, whose first table is said to have `rows` rows."""
    graph = analysed(tables_model(two_tables), IDS)
    table = replace(table_of(graph), num_rows=rows)
    return replace(graph, tables=tuple(table if t.parameter == TABLE else t for t in graph.tables))


ROWS = {TABLE: (100, 140), OTHER: (3, 3)}


def planned(
    num_rows: int = 1_000_000,
    rows: Mapping[str, tuple[int, ...]] = ROWS,
    world_size: int = 2,
    strategy: Strategy = "auto",
    sparsity: Mapping[str, Sparsity] | None = None,
    **facts: Any,
) -> Plan:
    """The plan of `two_tables`; `facts` are those of the first table."""
    shapes = {TABLE: (num_rows, 4), OTHER: (10, 4), "linear.weight": (4, 4), "linear.bias": (4,)}
    all_facts = tuple(
        replace(FACTS, name=name, shape=shape, **(facts if name == TABLE else {})) for name, shape in shapes.items()
    )
    found = Findings(graph_of(num_rows), all_facts, rows, world_size, strategy, sparsity=sparsity or {})
    return decide(found)
