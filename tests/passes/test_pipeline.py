"""The pipeline: its order, what is kept after each pass, and that nothing broken gets through."""

from __future__ import annotations

import pytest
import torch

from embrace_fx.passes.pipeline import run_passes, training_passes
from embrace_fx.passes.shard import ShardTables
from embrace_fx.passes.verifier.invariants import VerificationError
from embrace_fx.vocabulary.graph import TrainingGraph
from tests.support.graphs import (
    IDS,
    analysed,
    classifier,
    tables_model,
    targets,
)
from tests.support.many_uses import TABLE, plan_of
from tests.support.table_cases import plain


def test_a_plan_that_shards_and_reduces_nothing_changes_nothing() -> None:
    graph = analysed(classifier(), IDS)
    compiled = run_passes(graph, training_passes(plan_of(), {"words.weight"}, 0))
    assert all(found is graph.module for name, found in compiled.graphs.items() if name not in compiled.graph.phases)
    assert compiled.graph.module is graph.module


@pytest.mark.parametrize(("reduce", "expected"), [(True, 1), (False, 0)])
def test_gradients_are_left_alone_where_they_are_accumulated(reduce: bool, expected: int) -> None:
    plan = plan_of(world_size=2, buckets=(("linear.weight", "linear.bias"),))
    compiled = run_passes(analysed(tables_model(plain), IDS), training_passes(plan, {TABLE}, 0, reduce=reduce))
    assert targets(compiled.graph.graph).count("_c10d_functional::all_reduce_") == expected


class DropsWaits:
    """A pass with a bug: its graph lacks the waits for collectives."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        result = graph.edit()
        for wait in result.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default):
            wait.replace_all_uses_with(wait.all_input_nodes[0])
            result.graph.erase_node(wait)
        return result


class Copies:
    """A pass that changes nothing."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return graph.edit()


@pytest.mark.parametrize("behind", [(), (Copies(),)], ids=["last", "not last"])
def test_a_broken_pass_is_named(behind: tuple[Copies, ...]) -> None:
    shard = next(each for each in training_passes(plan_of(TABLE), {TABLE}, 0) if isinstance(each, ShardTables))
    graph = analysed(tables_model(plain), IDS)
    with pytest.raises(VerificationError, match=r"\(in pass DropsWaits"):
        run_passes(graph, (DropsWaits(), *behind), run_passes(graph, (shard, Copies())))
