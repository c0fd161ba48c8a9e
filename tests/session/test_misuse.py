"""Calls in the wrong order, arguments of another kind, models that ask for little: what is said, or done, instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.capture.errors import CaptureError
from tests.support.messages import assert_says
from tests.support.ranks import run_ranks
from tests.support.words import words_batch, words_model


def test_a_model_without_a_table_says_so_in_its_report() -> None:
    model = embrace_fx.compile(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    model(torch.ones(4, 2)).sum().backward()
    assert "no tables: every gradient is reduced densely" in model.report()


def test_a_model_with_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no trainable parameter") as caught:
        embrace_fx.compile(words_model().requires_grad_(False))
    assert_says(str(caught.value), "compile()", "Words", "Call the model itself")


def test_another_model_in_the_place_of_the_compiled_one() -> None:
    compiled = embrace_fx.compile(words_model())
    names = list(compiled.state_dict())
    with pytest.raises(AttributeError) as caught:
        compiled.module = words_model()  # type: ignore[misc]
    assert_says(str(caught.value), "cannot be replaced", "by a Words", "load_state_dict()")
    assert list(compiled.state_dict()) == names


@pytest.mark.parametrize("name", ["report", "plan", "graphs"])
def test_nothing_to_see_before_the_first_call(name: str) -> None:
    model = embrace_fx.compile(words_model())
    with pytest.raises(RuntimeError) as caught:
        model.report() if name == "report" else getattr(model, name)
    assert_says(str(caught.value), "There is no plan", "Call the model once")


def test_a_second_lookahead_while_the_first_is_read() -> None:
    model = embrace_fx.compile(words_model())
    first: Iterator[int] = model.lookahead([1, 2, 3])
    next(first)
    with pytest.raises(RuntimeError) as caught:
        model.lookahead([1, 2, 3])
    assert_says(str(caught.value), "lookahead(): an earlier lookahead() is not exhausted", "Finish its loop")
    assert list(first) == [2, 3]


def test_a_lookahead_after_one_that_was_finished_or_left() -> None:
    model = embrace_fx.compile(words_model())
    for _ in model.lookahead([1, 2]):
        pass
    for _ in model.lookahead([1, 2]):
        break
    assert list(model.lookahead([3, 4])) == [3, 4]


OPTIONS = ("schedule", "row_updates", "backend", "route", "broadcast_buffers", "rows")


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"optimizer": SGD}, "is the class SGD"),
        ({"optimizer": "adam"}, "is 'adam' of type str"),
        ({"strategy": None}, "strategy is None"),
        ({"cluster": 25}, "cluster is 25"),
        ({"optimizer": SGD(words_model().parameters(), 0.1)}, "SGD has no parameter of Words"),
        ({"strategy": "sloppy"}, "no strategy 'sloppy'"),
        *(({option: "sloppy"}, f"compile.*{option} is 'sloppy'") for option in OPTIONS),
    ],
)
def test_an_argument_of_another_kind(arguments: dict[str, Any], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        embrace_fx.compile(words_model(), **arguments)
    with pytest.raises(ValueError, match=r"not an nn.Module"):
        embrace_fx.compile(lambda x: x)  # type: ignore[arg-type]


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
