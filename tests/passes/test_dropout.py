"""Dropout on the CPU: the noise of eager, one multiplication each way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from embrace_fx.passes.dropout import EagerDropout
from embrace_fx.vocabulary.graph import Gradient, Parameter, Result
from tests.support.golden import check_golden
from tests.support.graphs import IDS, Tables, analysed, run_graph, tables_model, tangent, targets, text, verified


def once(model: Tables, ids: Tensor) -> Tensor:
    return F.dropout(model.table(ids), 0.4)


def twice(model: Tables, ids: Tensor) -> Tensor:
    hidden = F.dropout(model.table(ids), 0.4)
    return F.dropout(model.linear(hidden), 0.25)


def transposed(model: Tables, ids: Tensor) -> Tensor:
    """Transposes the output of a dropout, so that the linear layer's backward takes a view of its gradient."""
    hidden = model.linear(model.table(ids))
    dropped = F.dropout(F.dropout(hidden.tanh(), 0.2) * hidden, 0.5)
    return dropped.transpose(0, 1).contiguous()


def test_golden() -> None:
    graph = analysed(tables_model(once), IDS)
    check_golden("eager_dropout", text(verified(EagerDropout(), graph).module))


@pytest.mark.parametrize("forward", [once, twice, transposed])
def test_results_and_gradients_are_eagers(forward: Callable[..., Tensor]) -> None:
    model = tables_model(forward)
    graph = analysed(model, IDS)
    after = verified(EagerDropout(), graph)
    found = run_graph(after, model, IDS, seed=3)
    torch.manual_seed(3)
    expected = model(IDS)
    expected.backward(tangent(expected))
    torch.testing.assert_close(found[Result(0)], expected, rtol=0, atol=0)
    torch.testing.assert_close(found[Gradient(Parameter("table.weight"))], model.weight.grad)
    assert "aten::native_dropout" not in targets(after.graph)


def test_dropout_of_nothing_copies_nothing() -> None:
    model = tables_model(lambda m, x: F.dropout(m.linear(F.dropout(m.table(x), 0.0)), 0.0).square())
    graph = analysed(model, IDS)
    after = verified(EagerDropout(), graph)
    assert "aten::clone" in targets(graph.graph)
    assert "aten::clone" not in targets(after.graph)
    found, expected = run_graph(after, model, IDS), model(IDS)
    torch.testing.assert_close(found[Result(0)], expected, rtol=0, atol=0)
    expected.backward(tangent(expected))
    torch.testing.assert_close(found[Gradient(Parameter("table.weight"))], model.weight.grad)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.table(x),
        lambda m, x: F.dropout(m.table(x), 0.0),
        lambda m, x: F.dropout(m.table(x), 1.0),
        lambda m, x: F.dropout(m.table(x), 0.5, training=False),
        lambda m, x: torch.native_dropout(m.table(x), 0.5, True),
    ],
    ids=["none", "of nothing", "of everything", "switched off", "the mask is a result"],
)
def test_anything_else_leaves_the_graph_itself(forward: Callable[..., Any]) -> None:
    graph = analysed(tables_model(forward), IDS)
    assert EagerDropout()(graph) is graph
