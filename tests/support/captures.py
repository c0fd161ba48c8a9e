"""Models with a forward of a test's own, captured, and their values next to eager's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from embrace_fx.capture import Captured, capture
from embrace_fx.vocabulary.graph import Gradient, Parameter, Result, Tangent
from tests.support.graphs import D, Outputs, V, run_graph, tangent


class Pair(NamedTuple):
    loss: Tensor
    scores: Tensor


@dataclasses.dataclass
class Output:
    """A result like those of `transformers` models, but a plain dataclass."""

    loss: Tensor
    scores: Tensor | None = None


class Model(nn.Module):
    """A tied table, a norm and a recurrent layer, with a forward that the test provides."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D)
        self.linear = nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D)
        self.rnn = nn.LSTM(D, D, num_layers=2, batch_first=True)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.table.weight
        self.own_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(self, *args, **kwargs)


def model_of(forward: Callable[..., Any]) -> Model:
    torch.manual_seed(0)
    return Model(forward).double()


def captured(forward: Callable[..., Any], *args: Any, train: bool = True, **kwargs: Any) -> Captured:
    return capture(model_of(forward), args, kwargs, train=train)


def plain(model: Model, ids: Tensor) -> Tensor:
    return model.linear(model.table(ids))


def inputs(found: Captured) -> set[Any]:
    return {role for _, role in found.graph.inputs()}


def outputs(found: Captured) -> list[Any]:
    return [role for _, role in found.graph.outputs()]


def leaves_of(results: Any) -> list[Any]:
    """Returns the flattened results, including the fields of dataclasses, which pytree does not flatten."""
    return pytree.tree_leaves(vars(results) if isinstance(results, Output) else results)


def check_values(forward: Callable[..., Any], *args: Any) -> Captured:
    """Captures a call: results, their structure, and gradients are eager's."""
    model = model_of(forward)
    found = capture(model, args, {}, train=True)
    values = run_graph(found.graph, model, *args)

    made = pytree.tree_unflatten([v for role, v in values.items() if isinstance(role, Result)], found.result_spec)
    eager = model(*args)
    results = leaves_of(eager)
    assert type(made) is type(eager)
    torch.testing.assert_close(leaves_of(made), [result.detach() for result in results], rtol=1e-12, atol=1e-12)

    differentiable = [k for k, result in enumerate(results) if result.requires_grad]
    assert sorted(role.index for role in inputs(found) if isinstance(role, Tangent)) == differentiable
    torch.autograd.backward([results[k] for k in differentiable], [tangent(results[k], k) for k in differentiable])
    expected = {Gradient(Parameter(n)): p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients: Outputs = {role: value for role, value in values.items() if isinstance(role, Gradient)}
    assert gradients.keys() == expected.keys()
    for role, value in expected.items():
        torch.testing.assert_close(gradients[role], value, rtol=1e-12, atol=1e-12)
    return found
