"""Lowering: the same order and values, kernels called directly, and arguments that live no longer than needed."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from embrace_fx.runtime.lower.lower import _BOUND, _fast_call, lower_phase
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.step_handshake import StepHandshake
from embrace_fx.vocabulary.in_place import overwritten_argument
from tests.support.golden import check_golden
from tests.support.graphs import IDS, analysed, by_op, classifier, sharding


def graph_of(function: Callable[..., Any], **attributes: Any) -> fx.GraphModule:
    """Returns a traced function over ATen ops that returns its results as one tuple."""
    module = fx.symbolic_trace(function)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def test_golden() -> None:
    """Kernels and launches as plain functions, and an end to every value's life: forward and backward in one."""
    module = sharding("words.weight")(analysed(classifier(), IDS)).module
    communicator = Communicator(None)
    announced = {"embrace::all_gather_ids": StepHandshake(communicator).all_gather_ids}
    phase = lower_phase(module, by_op({**communicator.launches(), **announced}))
    check_golden("lowered", phase.__self__.code.strip())  # type: ignore[attr-defined]


def test_an_op_overwrites_only_what_nobody_else_reads() -> None:
    graph = make_fx(lambda x: (x.neg() + x, x - x.neg(), x * x.neg()))(torch.ones(2)).graph
    found = {node.name: overwritten_argument(node) for node in graph.nodes}
    assert {name: found[name] for name in ("add", "sub", "mul")} == {"add": 0, "sub": None, "mul": 1}


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

    phase = lower_phase(graph_of(program), lambda node: probe if "neg" in node.name else None)
    arguments = [argument]
    del argument

    (found,) = phase(arguments)

    assert arguments == []
    assert alive == [False]
    assert found.tolist() == [2.0, 2.0]


X, WHERE = torch.rand(4, 4) + 0.5, torch.tensor([[2, 0], [1, 1]])
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("addcmul.default", "addmm.default"), (X, X, X)),
    **dict.fromkeys(("bmm.default",), (X[None], X[None])),
    **dict.fromkeys(("pow.Tensor_Scalar", "unsqueeze.default"), (X, 1)),
    **dict.fromkeys(("sum.dim_IntList", "mean.dim"), (X, [0], True)),
    **dict.fromkeys(("_softmax.default", "_log_softmax.default"), (X, 1, False)),
    **dict.fromkeys(("_softmax_backward_data.default", "_log_softmax_backward_data.default"), (X, X, 1, X.dtype)),
    "baddbmm.default": (X[None], X[None], X[None]),
    "where.self": (X > 1, X, X.t()),
    "view.default": (X, [2, 8]),
    "expand.default": (X[:1], [4, 4]),
    "transpose.int": (X, 0, 1),
    "permute.default": (X, [1, 0]),
    "squeeze.dim": (X[:, :1], 1),
    "select.int": (X, 1, 2),
    "cat.default": ([X, X], 1),
    "split_with_sizes.default": (X, [1, 3], 1),
    "native_dropout.default": (X, 0.0, True),
    "native_layer_norm.default": (X, [4], X[0], X[1], 1e-5),
    "embedding.default": (X, WHERE, -1, False, False),
    "index_select.default": (X, 0, WHERE[0]),
    "gather.default": (X, 1, WHERE),
    "convolution.default": (X[None, None], X[None, None], None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
}
"""Arguments of ops; others take as many times X as they take tensors."""


@pytest.mark.parametrize("name", sorted(_BOUND))
def test_a_binding_of_torch_takes_what_its_op_takes(name: str) -> None:
    packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    tensors = sum(not argument.kwarg_only for argument in op._schema.arguments)
    arguments = ARGUMENTS.get(name, (X,) * tensors)
    found, expected = (call(*copy.deepcopy(arguments)) for call in (_fast_call(op), op))
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
