"""Rows awaited where they are first computed with: with the same values, and nothing else moved."""

from __future__ import annotations

import pytest
from torch import fx

from embrace_fx.passes.node_cost import is_heavy
from embrace_fx.passes.overlap.await_late import AwaitRowsLate
from embrace_fx.passes.overlap.submit_early import SubmitGradientsEarly
from embrace_fx.passes.pipeline import run_passes
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import launch_of, op_name
from tests.support.language_models import LAYERS, TABLES, captured, passes_of


def overlapped(read_at_once: bool = False) -> tuple[TrainingGraph, TrainingGraph]:
    """The graph before `AwaitRowsLate`, and after it; verified."""
    *passes, moving, last = passes_of()
    assert (moving, last) == (AwaitRowsLate(), SubmitGradientsEarly())
    graph = captured(read_at_once=read_at_once)
    before = run_passes(graph, passes).graph
    return before, run_passes(graph, (*passes, moving)).graph if not read_at_once else AwaitRowsLate()(before)


def products_before(graph: TrainingGraph, table: str) -> int:
    """Returns the number of layers that run before the first rows of a table are awaited."""
    nodes = list(graph.phases["forward"].graph.nodes)
    (first, *_) = (k for k, node in enumerate(nodes) if awaits(node, table))
    return sum(is_heavy(node) for node in nodes[:first])


def awaits(node: fx.Node, table: str) -> bool:
    launch = launch_of(node)
    return op_name(node) == "embrace::await_rows" and launch is not None and launch.what == table


def test_the_output_tables_rows_are_awaited_behind_the_last_layer() -> None:
    before, after = overlapped()
    assert [products_before(before, table) for table in TABLES] == [0, 0]
    assert [products_before(after, table) for table in TABLES] == [0, LAYERS]


@pytest.mark.long
def test_rows_that_are_read_at_once_stay() -> None:
    before, after = overlapped(read_at_once=True)
    assert after is before
