"""Calls told apart: which share a capture, and which sizes a capture leaves open."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embrace_fx.capture.arguments import flatten_arguments
from embrace_fx.session.graph_calls import varying_sizes
from embrace_fx.session.program_cache import Entries, ProgramCache, key_of

IDS, MASK = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)


def key(*args: Any, train: bool = True, modes: tuple[bool, ...] = (True,)) -> Any:
    leaves, spec = flatten_arguments(args, {})
    return key_of(modes, leaves, spec, train)


def test_shapes_and_values_of_tensors_do_not_tell_calls_apart() -> None:
    assert key(IDS, MASK) == key(torch.ones(5, 7, dtype=torch.int64), MASK[:1])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(key(IDS.int(), MASK), id="a dtype"),
        pytest.param(key(IDS[0], MASK), id="dimensions"),
        pytest.param(key(IDS, MASK.clone().requires_grad_()), id="a gradient of the batch"),
        pytest.param(key((IDS, MASK)), id="structure"),
        pytest.param(key(IDS, 1), id="a constant in place of a tensor"),
        pytest.param(key(IDS, MASK, train=False), id="an evaluation"),
        pytest.param(key(IDS, MASK, modes=(False,)), id="a module's mode"),
    ],
)
def test_what_tells_calls_apart(other: Any) -> None:
    assert key(IDS, MASK) != other


def test_constants_are_told_apart_by_type() -> None:
    """Their values, each capture looks at by itself, as far as its forward reads them."""
    assert key(IDS, 1) == key(IDS, 2)
    assert len({key(IDS, constant) for constant in (1, 1.0, True, None, "1")}) == 5


def test_autocast_tells_calls_apart() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        half = key(IDS)
    assert half != key(IDS)


def test_an_evaluation_knows_what_has_varied_in_training() -> None:
    cache = ProgramCache()
    cache[key(IDS)].shapes.append({0: (2, 3)})
    assert cache[key(IDS, train=False)].shapes == [{0: (2, 3)}]
    assert cache[key(MASK)].shapes == []
    assert cache[key(IDS)] is not cache[key(IDS, train=False)]


# -- sizes that vary ---------------------------------------------------------------------------------------------------


def varying(*shapes: tuple[int, ...]) -> frozenset[tuple[int, int]]:
    """Of calls with one tensor each."""
    return varying_sizes(Entries(shapes=[{0: shape} for shape in shapes]))


def test_the_first_call_has_only_numbers() -> None:
    assert varying((4, 7)) == frozenset()


def test_a_size_that_has_varied_is_open_and_so_are_first_sizes() -> None:
    assert varying((4, 7), (4, 9)) == {(0, 0), (0, 1)}


def test_a_first_size_as_large_as_one_that_has_varied_stays_a_number() -> None:
    assert varying((4, 7), (4, 4)) == {(0, 1)}


def test_a_size_that_varied_long_ago_is_still_open() -> None:
    assert (0, 1) in varying((4, 7), (4, 9), (4, 9))


def test_tensors_are_told_apart_by_their_place() -> None:
    calls = [{0: (4,), 1: (4, 7)}, {0: (4,), 1: (4, 9)}]
    assert varying_sizes(Entries(shapes=calls)) == {(0, 0), (1, 0), (1, 1)}
