"""What a forward may return, and how it comes back."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import embrace_fx
from tests.support.captures import Model, Output, Pair, captured, check_values, model_of, plain
from tests.support.graphs import IDS


def two_views(model: Model, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scores = plain(model, ids)
    return scores, scores.flatten(), scores.transpose(0, 1)


def halves(model: Model, ids: Tensor) -> tuple[Tensor, ...]:
    return plain(model, ids).chunk(2, -1)


def same_twice(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    scores = plain(model, ids)
    return scores, scores


def detached_too(model: Model, ids: Tensor) -> tuple[Tensor, Tensor]:
    scores = plain(model, ids)
    return scores, scores.detach()


RESULTS: dict[str, Callable[[Model, Tensor], Any]] = {
    "a tuple": lambda m, x: (plain(m, x), m.table(x)),
    "a list in a dict": lambda m, x: {"scores": [plain(m, x)], "loss": plain(m, x).sum()},
    "an ordered dict": lambda m, x: collections.OrderedDict(loss=plain(m, x).sum(), scores=plain(m, x)),
    "a named tuple": lambda m, x: Pair(plain(m, x).sum(), plain(m, x)),
    "a dataclass": lambda m, x: Output(plain(m, x).sum(), plain(m, x)),
    "an argument itself": lambda m, x: (plain(m, x), x),
    "a part of an argument": lambda m, x: (plain(m, x), x[0]),
    "views of one tensor": two_views,
    "the halves of one tensor": halves,
    "the same tensor twice": same_twice,
    "a detached twin": detached_too,
    "a parameter": lambda m, x: (plain(m, x), m.linear.weight),
    "a part of a parameter": lambda m, x: (plain(m, x), m.linear.weight[0]),
    "a parameter that nothing else reads": lambda m, x: (plain(m, x), m.norm.weight),
    "a constant tensor": lambda m, x: (plain(m, x), torch.ones(3)),
}


@pytest.mark.parametrize("forward", RESULTS.values(), ids=RESULTS)
def test_results_have_eagers_values_and_structure(forward: Callable[..., Any]) -> None:
    check_values(forward, IDS)


@pytest.mark.parametrize(
    ("forward", "constants"),
    [
        (lambda m, x: (plain(m, x), None, "text", 3), {1: None, 2: "text", 3: 3}),
        (lambda m, x: Output(plain(m, x).sum()), {1: None}),
        (lambda m, x: (None, plain(m, x)), {0: None}),
    ],
    ids=["between", "in a dataclass", "first"],
)
def test_results_that_are_not_tensors(forward: Callable[..., Any], constants: dict[int, Any]) -> None:
    assert captured(forward, IDS).result_constants == constants


def test_nothing_but_none_is_a_result_too() -> None:
    """A result of None is in no graph, because it has no tensor."""
    assert embrace_fx.compile(model_of(lambda m, x: None))(IDS) is None
