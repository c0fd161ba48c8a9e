"""Checkpointed regions run again in the backward: eager checkpointing's gradients, bit for bit, and no more memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import embrace_fx
from embrace_fx.passes.dropout import EagerDropout
from embrace_fx.passes.memory.regions import RecomputeRegions
from embrace_fx.passes.pipeline import run_passes
from embrace_fx.passes.verifier.invariants import VerificationError, verify
from embrace_fx.vocabulary.graph import TrainingGraph
from tests.support.cases import long_but
from tests.support.checkpointed import (
    FORMS,
    IDS,
    Block,
    Model,
    Normalised,
    Odd,
    Recurrent,
    all_in_one,
    assert_equal_gradients,
    gradients,
)
from tests.support.counted_memory import CountedMemory
from tests.support.graphs import analysed

pytestmark = pytest.mark.filterwarnings("ignore:Detected that context_fn:UserWarning")


def memory(model: nn.Module, call: Callable[..., Tensor], *args: Tensor) -> tuple[int, int]:
    """Bytes saved for the backward, and the most there are at a time; once more than needed, for what is lazy."""
    for _ in range(2):
        with CountedMemory([*model.parameters(), *model.buffers(), *args]) as counted:
            loss = call(*args)
            saved = counted.held_bytes
            loss.backward()
        del loss
        model.zero_grad()
    return saved, counted.peak_bytes


def pair(through: Callable[[Model, Tensor], Tensor], blocks: Callable[[], nn.Module] = Block) -> tuple[Any, Any]:
    """Returns a model and a compiled copy of it."""
    torch.manual_seed(0)
    model = Model(through, blocks)
    return model, embrace_fx.compile(copy.deepcopy(model))


@pytest.mark.parametrize("form", long_but(("a lookup within",), {form: (form,) for form in FORMS}))
def test_gradients_are_those_of_eager_checkpointing_and_no_more_is_held(form: str) -> None:
    model, compiled = pair(FORMS[form])
    assert_equal_gradients(gradients(compiled.module, compiled, IDS), gradients(model, model, IDS))
    saved, peak = memory(compiled.module, compiled, IDS)
    eager_saved, eager_peak = memory(model, model, IDS)
    assert saved <= 1.02 * eager_saved + 8  # 8 bytes for the loss, which is saved twice
    assert peak <= 1.05 * eager_peak


@pytest.mark.parametrize(
    ("form", "blocks"),
    [("not reentrant", Normalised), pytest.param("nested", Recurrent, marks=pytest.mark.long), ("nested", Odd)],
    ids=str,
)
def test_whatever_a_region_holds(form: str, blocks: Callable[[], nn.Module]) -> None:
    model, compiled = pair(FORMS[form], blocks)
    assert_equal_gradients(gradients(compiled.module, compiled, IDS), gradients(model, model, IDS))


def test_statistics_move_once_a_step() -> None:
    """Eager checkpointing moves them whenever a region runs."""
    model, compiled = pair(FORMS["not reentrant"], Normalised)
    plain = copy.deepcopy(model)
    plain.through = lambda own, ids: all_in_one(own, own.table(ids))
    gradients(compiled.module, compiled, IDS)
    gradients(plain, plain, IDS)
    for name, buffer in plain.named_buffers():
        assert torch.equal(compiled.module.get_buffer(name), buffer), name


def test_the_generator_goes_on_as_without_checkpointing() -> None:
    """Recomputing dropout in the backward must not change the random numbers of the next step."""
    model, compiled = pair(FORMS["nested"])
    after = []
    for own, call in ((model, model), (compiled.module, compiled)):
        gradients(own, call, IDS)
        after.append(torch.rand(3))
    assert torch.equal(*after)


def _other_input(nodes: dict[str, fx.Node]) -> None:
    nodes["tanh_again"].args = (nodes["view_7_again"],)


def _other_op(nodes: dict[str, fx.Node]) -> None:
    nodes["tanh_again"].target = torch.ops.aten.sigmoid.default


def _end_too_early(nodes: dict[str, fx.Node]) -> None:
    nodes["native_dropout_5_drawn_again"].prepend(nodes["native_dropout_5_drawn_replayed"])


def _another_state(nodes: dict[str, fx.Node]) -> None:
    nodes["native_dropout_4_drawn_replay"].args = (
        nodes["native_dropout_2_drawn_state"],
        *nodes["native_dropout_4_drawn_replay"].args[1:],
    )


def _first_draw_left_out(nodes: dict[str, fx.Node]) -> None:
    noise = nodes["native_dropout_drawn_again"]
    noise.replace_all_uses_with(nodes["native_dropout_drawn"])
    noise.graph.erase_node(noise)


@cache
def _with_copies() -> TrainingGraph:
    model, _ = pair(FORMS["not reentrant"])
    return run_passes(analysed(model, IDS), (EagerDropout(), RecomputeRegions())).graph


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (_other_input, "copies_equal_originals"),
        (_other_op, "copies_equal_originals"),
        (_end_too_early, "replays_draw_equally"),
        pytest.param(_another_state, "replays_draw_equally", marks=pytest.mark.long),
        (_first_draw_left_out, "replays_draw_equally"),
    ],
)
def test_a_copy_that_is_none_is_refused(change: Callable[[dict[str, fx.Node]], None], invariant: str) -> None:
    graph = _with_copies().edit()
    verify(graph, after="nothing")
    change({node.name: node for node in graph.graph.nodes})
    with pytest.raises(VerificationError, match=invariant):
        verify(graph, after="a broken pass")
