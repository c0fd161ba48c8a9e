"""Lowering: the same order and values, kernels called directly, and arguments that live no longer than needed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.runtime import kernels
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


def test_local_ops_become_calls_of_their_kernels_and_launches_the_given_functions() -> None:
    def reduce(flat: Tensor, op: str, group: str) -> Tensor:
        return flat * 10

    def program(a: Tensor, b: Tensor) -> Any:
        bucket = torch.ops.embrace.pack_bucket.default([a, b], 0.5)
        return (torch.ops._c10d_functional.all_reduce_.default(bucket, "sum", "dense"),)

    phase = lower(graph_of(program), by_op({"_c10d_functional::all_reduce_": reduce}))
    (found,) = phase([torch.ones(2), torch.full((1,), 4.0)])
    assert found.tolist() == [5.0, 5.0, 20.0]
    called = {node.target for node in phase.__self__.graph.nodes if node.op == "call_function"}  # type: ignore[attr-defined]
    assert called == {kernels.pack_bucket, reduce}


def test_a_single_node_may_call_something_else() -> None:
    def program(a: Tensor) -> Any:
        first = torch.ops.aten.neg.default(a)
        return (torch.ops.aten.neg.default(first),)

    def special(node: fx.Node) -> Callable[..., Any] | None:
        return torch.exp if node.name == "neg_default_1" else None

    (found,) = lower(graph_of(program), special)([torch.zeros(1)])
    assert found.tolist() == [1.0]


def test_the_graph_that_is_lowered_stays_as_it_was() -> None:
    module = graph_of(lambda a: (torch.ops.embrace.split_columns.default(a, 2),))
    before = module.code
    lower(module)([torch.ones(1, 4)])
    assert module.code == before


def test_constants_of_the_graph_are_found() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.add.Tensor, (x, graph.get_attr("constant"))),))
    root = torch.nn.Module()
    root.register_buffer("constant", torch.full((1,), 3.0))
    (found,) = lower(fx.GraphModule(root, graph))([torch.ones(1)])
    assert found.tolist() == [4.0]


def test_a_phase_without_inputs() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.ones.default, ([2],)),))
    (found,) = lower(fx.GraphModule(torch.nn.Module(), graph))([])
    assert found.tolist() == [1.0, 1.0]


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
