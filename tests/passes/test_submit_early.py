"""Row gradients moved up: to where their inputs are complete, with the same values, and nothing else moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from embrace_fx.cost import links as cost
from embrace_fx.passes.node_cost import node_time_estimator
from embrace_fx.passes.overlap.submit_early import SubmitGradientsEarly
from embrace_fx.passes.pipeline import overlap_passes, run_passes, training_passes
from embrace_fx.passes.planner.grouping import Joinable, plan_joined_tables
from embrace_fx.passes.scheduler.step_graph import compute_blocks
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import compute_id
from embrace_fx.vocabulary.ops import op_name
from embrace_fx.vocabulary.plan import Decision, Plan
from embrace_fx.vocabulary.schedule import Cuts
from tests.support.graphs import analysed
from tests.support.language_models import BATCH, DIM, LENGTH, WORDS, captured, passes_of


def overlapped() -> tuple[TrainingGraph, TrainingGraph]:
    """The graph before `SubmitGradientsEarly`, and after it."""
    *passes, last = passes_of()
    assert last == SubmitGradientsEarly()
    before = run_passes(captured(), passes).graph
    return before, SubmitGradientsEarly()(before)


def share_of_backward(graph: TrainingGraph, table: str) -> float:
    """Returns the share of a backward's compute that precedes the submission of a table's gradient."""
    of_backward = [
        block
        for block in compute_blocks(graph, node_time_estimator(cost.Cluster().compute))
        if block.id.kind == "backward"
    ]
    place = [block.id for block in of_backward].index(compute_id("backward", table))
    return sum(block.ms for block in of_backward[: place + 1]) / sum(block.ms for block in of_backward)


@pytest.mark.long
def test_the_output_tables_gradient_leaves_in_the_first_tenth_of_the_backward() -> None:
    before, after = overlapped()
    assert share_of_backward(before, "output.weight") > 0.9
    assert share_of_backward(after, "output.weight") < 0.1
    assert share_of_backward(after, "words.weight") > 0.9


class Sum(nn.Module):
    """A model whose backward passes its incoming gradient to the table unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(WORDS, DIM, mode="sum")

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def test_nothing_moves_before_the_head() -> None:
    decision = Decision("table.weight", (WORDS, DIM), True, "alltoall", "requested", 1000, 0, 0.0)
    plan = Plan(2, (decision,), ())
    passes = overlap_passes(plan, "2d", 0, Cuts((), (("table.weight", 1),)))
    captured = analysed(Sum(), torch.randint(WORDS, (BATCH, LENGTH)))
    graph = run_passes(captured, (*training_passes(plan, ("table.weight",), 0), *passes)).graph
    ops = [op_name(node) for node in graph.phases["backward"].graph.nodes if op_name(node).startswith("embrace::")]
    assert ops[:3] == ["embrace::update_rows", "embrace::await_ids", "embrace::submit_rows"]


def test_tables_whose_gradients_can_be_had_at_different_places_are_no_space() -> None:
    graph = captured()
    assert plan_joined_tables(graph, [Joinable(table, 0, 1000) for table in graph.tables], overlaps=True) == ()
