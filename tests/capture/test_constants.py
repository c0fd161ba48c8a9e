"""Arguments that are no tensors: those that a forward reads are constants of its graph, others ride along."""

from __future__ import annotations

import datetime
import math
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._traceback import shorten_filename

import embrace_fx
from embrace_fx.capture import capture
from embrace_fx.capture.arguments import same_constant
from embrace_fx.capture.errors import RefusedError, line_of_branch
from tests.support.captures import Model, model_of, plain
from tests.support.graphs import IDS
from tests.support.inside import captures_of


def reads_scale(model: Model, ids: Tensor, batch: Mapping[str, Any], *more: Any, scale: float = 1.0) -> Tensor:
    found: Tensor = plain(model, ids).sum() * scale * batch["by"]
    return found * more[0] if more else found


def _leaves(*args: Any, **kwargs: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves((args, kwargs))


def test_what_is_read_decides_and_what_is_not_read_does_not() -> None:
    batch = {"by": 2, "text": "one", "at": np.array([1]), "when": datetime.date(2020, 1, 1)}
    found = capture(model_of(reads_scale), (IDS, batch), {"scale": 0.5}, train=True)
    assert set(found.constants.values()) == {2, 0.5}
    other = {"by": 2, "text": "another", "at": np.array([2, 3]), "when": None}
    assert found.accepts(_leaves(IDS, other, scale=0.5))
    assert not found.accepts(_leaves(IDS, other, scale=0.25))
    assert not found.accepts(_leaves(IDS, {**other, "by": 3}, scale=0.5))


def test_further_positional_arguments_are_read_by_their_places() -> None:
    found = capture(model_of(reads_scale), (IDS, {"by": 1}, 3), {}, train=True)
    assert list(found.constants.values()) == [1, 3]


@pytest.mark.parametrize(
    "forward", [lambda m, x, text: (plain(m, x), text), lambda m, x, text: {"found": plain(m, x), "text": text}]
)
def test_what_is_returned_is_what_was_given(forward: Callable[..., Any]) -> None:
    compiled = embrace_fx.compile(model_of(forward))
    for text in ("one", "two"):
        found = compiled(IDS, text)
        assert text in (found.values() if isinstance(found, dict) else found)


def test_texts_and_arrays_that_change_at_each_step_need_one_capture() -> None:
    compiled = embrace_fx.compile(model_of(lambda m, x, batch: plain(m, x).sum()))
    for step in range(6):
        compiled(IDS, {"text": f"{step}", "at": np.arange(step), "step": step}).backward()
    assert captures_of(compiled) == 1


def test_a_number_that_changes_at_each_step_may_be_the_first_input_of_the_graph() -> None:
    compiled = embrace_fx.compile(model_of(lambda m, x, by: (by + 1.0) * plain(m, x).sum()))
    ratios = [(compiled(IDS, step / 8) / compiled(IDS, 0.0)).item() for step in range(1, 7)]
    assert ratios == pytest.approx([1 + step / 8 for step in range(1, 7)])
    assert captures_of(compiled) < 5


@pytest.mark.parametrize("steps", [(0, 1, 2), (0, 0, 1, 2, 3)], ids=["no capture is used again", "the first one is"])
def test_a_float_that_decides_what_is_traced_is_captured_three_times(steps: tuple[int, ...]) -> None:
    forward = model_of(lambda m, x, by: plain(m, x).sum() * {0.0: 1.0}.get(by, 3.0))
    compiled = embrace_fx.compile(forward, route="graph")
    for step in steps:
        compiled(IDS, step / 8).backward()
    with pytest.raises(RefusedError, match="last 3 captured graphs was used for only one call"):
        compiled(IDS, 0.5)


@pytest.mark.parametrize(
    ("factor", "captures"),
    [
        (lambda by: math.cos(math.pi * by) + math.tanh(by) + math.sqrt(by) + math.log2(1 + by), 2),
        (lambda by: abs(by - 0.3) + round(by, 1) + round(by) + math.floor(5 * by), 2),
        (lambda by: math.log(by + 1.0), 3),  # after three captures the forward runs eagerly
        (lambda by: by // 0.1 + by % 0.1, 3),
        (lambda by: divmod(by, 0.1)[0] + 1, 3),
        (lambda by: (int(by * 10) ^ 5) + (int(by * 10) << 2) + (int(by * 10) >> 1), 2),
    ],
    ids=["functions", "rounded", "logarithm", "divided", "divmod", "bits"],
)
def test_an_annealed_number_has_the_value_that_python_computes(factor: Callable[[float], float], captures: int) -> None:
    compiled = embrace_fx.compile(model_of(lambda m, x, by: plain(m, x).sum() * factor(by)))
    first = (compiled(IDS, 0.25) / factor(0.25)).item()
    for step in range(1, 10):
        loss = compiled(IDS, step / 10)
        loss.backward()
        assert loss.item() == pytest.approx(first * factor(step / 10), rel=1e-5)
    assert captures_of(compiled) == captures


def test_values_agree_where_they_are_of_one_type_and_equal() -> None:
    array = np.ones(2)
    assert same_constant(array, array)
    assert same_constant("a text", "a text"[:])
    assert not same_constant(1, 1.0)
    assert not same_constant(array, np.ones(2))  # comparing them returns an array, not a bool


@pytest.mark.parametrize("folder", ["/home/user/training", "/train", "/usr/lib/python3/site-packages/torch/nn"])
def test_a_branch_on_a_size_is_named_by_its_line(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = f"{folder}/{Path(__file__).name}"
    monkeypatch.setitem(sys.modules, "of_the_user", types.SimpleNamespace(__file__=file))
    assert line_of_branch([]) == line_of_branch(["a condition without a place"]) == ""
    conditions = ["s0 < 4  # other.py:1 in g", f"s0 > 2  # {shorten_filename(file)}:29 in f"]
    assert line_of_branch(conditions) == f"{file}:29 in f"
