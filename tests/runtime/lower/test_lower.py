"""Lowering: the same order and values, kernels called directly, and arguments that live no longer than needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.runtime.lower.lower import lower
from embrace_fx.runtime.ranks.announcement import Announcements
from embrace_fx.runtime.ranks.communicator import Communicator
from tests.support.golden import check_golden
from tests.support.graphs import IDS, analysed, by_op, classifier, sharding


def graph_of(function: Callable[..., Any], **attributes: Any) -> fx.GraphModule:
    """A traced function over ATen ops, its results in one tuple."""
    module = fx.symbolic_trace(function)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_golden() -> None:
    """Kernels and launches as plain functions, and an end to every value's life: forward and backward in one."""
    module = sharding("words.weight")(analysed(classifier(), IDS)).module
    communicator = Communicator(None)
    announced = {"embrace::all_gather_ids": Announcements(communicator).all_gather_ids}
    phase = lower(module, by_op({**communicator.launches(), **announced}))
    check_golden("lowered", phase.__self__.code.strip())  # type: ignore[attr-defined]


def test_an_argument_dies_with_its_last_use() -> None:
    alive: list[bool] = []
    argument = torch.ones(2)
    watched = weakref.ref(argument)

    def probe(value: Tensor) -> Tensor:
        alive.append(watched() is not None)
        return value

    def program(a: Tensor) -> Any:
        doubled = torch.ops.aten.mul.Tensor(a, 2)
        return (torch.ops.aten.neg.default(doubled),)

    phase = lower(graph_of(program), lambda node: probe if "neg" in node.name else None)
    arguments = [argument]
    del argument

    (found,) = phase(arguments)

    assert arguments == []
    assert alive == [False]
    assert found.tolist() == [2.0, 2.0]
