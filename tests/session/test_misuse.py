"""Calls in the wrong order, arguments of another kind, models that ask for little: what is said, or done, instead."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.capture.errors import CaptureError
from tests.support.golden import check_transcript, run_lines
from tests.support.messages import assert_says
from tests.support.ranks import run_ranks
from tests.support.words import words_batch, words_model


def test_a_model_without_a_table_says_so_in_its_report() -> None:
    model = embrace_fx.compile(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    model(torch.ones(4, 2)).sum().backward()
    assert "no tables: every gradient is reduced densely" in model.report()


def test_what_is_said() -> None:
    check_transcript("misuse", partial(run_lines, "setup", ("agreement", "options")))


def test_a_parameter_that_is_converted_after_the_first_call() -> None:
    model = words_model()
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1))
    compiled(*words_batch(0, 0)).backward()
    model.to(torch.float32)
    with pytest.raises(embrace_fx.PeerFailure, match=r"the dtype of .* has changed"):
        compiled(*words_batch(0, 1))


def test_a_batch_that_the_forward_does_not_take() -> None:
    model = words_model()
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1))
    with pytest.raises(CaptureError, match=r"the forward fails on this batch.*TypeError: .*missing") as caught:
        compiled()
    assert "does not depend on tensor values" not in str(caught.value)


class Choosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[0] > 2:
            raise KeyError("too many")
        return self.words(ids).sum()


def _raises_by_itself(rank: int, world_size: int) -> list[str]:
    compiled, told = embrace_fx.compile(Choosy(), strategy="alltoall"), []
    for lengths in ((3, 3), (2, 2), (2, 3), (1, 2)):  # lengths of 3 raise: on all ranks, or on rank 1 alone
        try:
            compiled(torch.arange(lengths[rank])).backward()
            told.append("")
        except (KeyError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_what_a_forward_raises_is_raised_with_its_own_type_where_it_was_raised() -> None:
    first, second = run_ranks(2, _raises_by_itself)
    assert first[0] == second[0] == second[2] == "KeyError: 'too many'"
    assert_says(first[2], "PeerFailure: rank 1", "the forward fails on this batch", "KeyError", "")
    assert [first[k] for k in (1, 3)] == [second[k] for k in (1, 3)] == ["", ""]
