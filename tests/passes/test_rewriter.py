"""What a pass inserts: named, with a fake value, and of the checkpointed region around it."""

from __future__ import annotations

import torch

from embrace_fx.passes.rewriter import Rewriter
from tests.support.graphs import IDS, analysed, classifier


def test_what_is_inserted_is_of_the_region_around_it() -> None:
    graph = analysed(classifier(), IDS).edit()
    first, second, *_ = [node for node in graph.graph.nodes if node.op == "call_function"]
    first.meta["region"], kept = (3,), first.meta["val"]
    rewriter = Rewriter(graph.module)

    with rewriter.before(first):
        within = rewriter.call(torch.ops.aten.relu.default, first.all_input_nodes[0], name="within")
        with rewriter.before(second):
            outside = rewriter.call(torch.ops.aten.relu.default, first, name="outside")
        also = rewriter.call(torch.ops.aten.relu.default, within, name="also")

    assert within.meta["region"] == also.meta["region"] == (3,)
    assert "region" not in outside.meta
    assert outside.meta["val"].shape == kept.shape
    assert [within.name, also.name] == ["within", "also"]
