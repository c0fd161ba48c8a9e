"""Fake values after a pass: which of them the verifier derives again, and that it leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from embrace_fx.passes.verifier.invariants import VerificationError, verify
from embrace_fx.vocabulary.graph import TrainingGraph
from tests.support.hand_built_graphs import B, D, dense_graph, dynamic_graph, table_graph, widen_z

aten = torch.ops.aten


def test_values_shared_with_a_verified_graph_are_not_derived_again() -> None:
    before = dense_graph()
    widen_z(before)
    after = before.edit()
    verify(after, after="Pass", previous=before)  # trusted: it says that `before` was verified
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
    graph.node("flat").update_arg(1, [2, B * D // 2])  # holds only where the batch has this many elements
    before = shape_env_state(graph)
    with pytest.raises(VerificationError, match=r"^values_agree: .* node flat"):
        verify(graph, after="View")
    assert shape_env_state(graph) == before


def test_no_fake_mode_stays_on_after_a_violation() -> None:
    graph = dense_graph()
    widen_z(graph)
    with pytest.raises(VerificationError) as raised:
        verify(graph, after="Cast")
    assert raised.tb is not None  # the frames of the verifier are still alive
    assert not isinstance(torch.ones(1), FakeTensor)
