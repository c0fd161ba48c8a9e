"""Fake values after a pass: which of them the verifier derives again, and that it leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.passes.verifier.invariants import VerificationError, verify
from embrace_fx.vocabulary.graph import TrainingGraph
from tests.support.hand_built_graphs import B, D, dense_graph, dynamic_graph, table_graph, widen_z

aten = torch.ops.aten


def test_values_shared_with_a_verified_graph_are_not_derived_again() -> None:
    before = dense_graph()
    widen_z(before)
    after = before.edit()
    verify(after, after="Pass", previous=before)  # passes, because `verify` trusts nodes of a previous graph
    after.node("z").target = aten.neg.default
    with pytest.raises(VerificationError, match=r"^values_agree: .* node z"):
        verify(after, after="Pass", previous=before)


def test_nodes_that_read_other_values_are_derived_again() -> None:
    before = dense_graph()
    verify(before, after="captured")
    after = before.edit()
    after.node("z").replace_input_with(after.node("y"), after.node("w"))
    with pytest.raises(VerificationError, match=r"^values_agree: .* node z"):
        verify(after, after="Pass", previous=before)


@pytest.mark.parametrize("change", ["target", "argument", "value of an argument"])
def test_values_that_a_pass_has_derived_are_derived_again_where_what_they_come_of_has_changed(change: str) -> None:
    graph = dense_graph()
    rewriter = Rewriter(graph.module)
    with rewriter.before(graph.node("z")):
        inserted = rewriter.call(aten.add.Tensor, graph.node("y"), graph.node("y"), name="twice")
    graph.node("z").replace_input_with(graph.node("y"), inserted)
    rewriter.refresh(graph.node("z"))
    verify(graph, after="Pass")
    match change:
        case "target":
            inserted.target = aten.eq.Tensor
        case "argument":
            inserted.args = (graph.node("y"), graph.node("y").meta["val"].shape[-1])
            inserted.target = aten.eq.Scalar
        case "value of an argument":
            with rewriter.fake_mode:
                graph.node("y").meta["val"] = graph.node("y").meta["val"].double()
    node = "y" if change == "value of an argument" else "twice"
    with pytest.raises(VerificationError, match=rf"^values_agree: .* node {node}"):
        verify(graph, after="Pass")


def shape_env_state(graph: TrainingGraph) -> tuple[int, int, int, str]:
    env = graph.node("x").meta["val"].fake_mode.shape_env
    pending = len(env.pending_fresh_unbacked_symbols)
    return len(env.guards), pending, env.num_deferred_runtime_asserts, str(env.replacements)


def test_no_symbols_are_left_behind() -> None:
    graph = table_graph()
    before = shape_env_state(graph)
    verify(graph, after="captured")
    assert shape_env_state(graph) == before


def test_no_guards_are_left_behind() -> None:
    graph = dynamic_graph()
    graph.node("flat").update_arg(1, [2, B * D // 2])  # only valid for a batch with this many elements
    before = shape_env_state(graph)
    with pytest.raises(VerificationError, match=r"^values_agree: .* node flat"):
        verify(graph, after="View")
    assert shape_env_state(graph) == before


def test_no_fake_mode_stays_on_after_a_violation() -> None:
    graph = dense_graph()
    widen_z(graph)
    with pytest.raises(VerificationError) as raised:
        verify(graph, after="Cast")
    assert raised.tb is not None  # the traceback keeps the verifier's frames alive
    assert not isinstance(torch.ones(1), FakeTensor)
