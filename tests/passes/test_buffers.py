"""Which buffers the replicas must share before a forward, and which only before an evaluation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.passes.buffers import live_buffers, mutated_buffers
from tests.support.graphs import IDS, Tables, analysed, tables_model


def normalised(model: Tables, ids: Tensor) -> Tensor:
    return model.get_submodule("norm")(model.linear(model.table(ids)).flatten(0, 1))


def counted_and_used(model: Tables, ids: Tensor) -> Tensor:
    model.get_buffer("calls").add_(1)
    return model.table(ids) * model.get_buffer("calls")


def counted(model: Tables, ids: Tensor) -> Tensor:
    model.get_buffer("calls").add_(1)
    return model.table(ids)


def only_read(model: Tables, ids: Tensor) -> Tensor:
    return model.table(ids) * model.get_buffer("calls")


STATISTICS = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


@pytest.mark.parametrize(
    ("forward", "mutated", "live"),
    [
        (normalised, STATISTICS, ()),
        (counted_and_used, ("calls",), ("calls",)),
        (counted, ("calls",), ()),
        (only_read, (), ()),
    ],
    ids=["batch norm", "counted and used", "counted", "only read"],
)
def test_buffers(forward: Callable[[Tables, Tensor], Tensor], mutated: tuple[str, ...], live: tuple[str, ...]) -> None:
    model = tables_model(forward)
    model.register_module("norm", nn.BatchNorm1d(4).double())
    model.register_buffer("calls", torch.ones((), dtype=torch.float64))
    graph = analysed(model, IDS)
    assert sorted(mutated_buffers(graph)) == sorted(mutated)
    assert live_buffers(graph) == live


def test_an_evaluation_changes_no_statistics() -> None:
    model = tables_model(normalised)
    model.register_module("norm", nn.BatchNorm1d(4).double().eval())
    assert mutated_buffers(analysed(model, IDS, train=False)) == ()


class Remembering(nn.Module):
    """Writes a buffer that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x_BD: Tensor) -> Tensor:
        loss: Tensor = self.linear(x_BD).square().mean()
        self.get_buffer("last").copy_(loss.detach())
        return loss


def test_a_buffer_that_is_only_written() -> None:
    model = Remembering()
    compiled = embrace_fx.compile(model)
    for _ in range(2):
        loss = compiled(torch.randn(4, 3))
        loss.backward()
        assert torch.equal(model.get_buffer("last"), loss)
