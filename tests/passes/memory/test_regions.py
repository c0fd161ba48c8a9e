"""Checkpointed regions run again in the backward: eager checkpointing's gradients, bit for bit, and no more memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
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
