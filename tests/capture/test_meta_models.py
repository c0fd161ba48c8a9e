"""Models on the meta device, captured as on the CPU: the same graph, and no memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from embrace_fx.capture import capture
from embrace_fx.capture.meta_models import is_on_meta, on_fake_cpu
from tests.support.graphs import text


class Tied(nn.Module):
    """A table that is both looked up and used in a matmul, below a recurrent layer, with a buffer."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8)
        self.cell = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 40, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.cell(self.table(ids) * self.scale)[0]).logsumexp(-1).mean()


def statements(module: fx.GraphModule) -> list[str]:
    """The printed graph without its comments, which name lines of the source."""
    return [line for line in text(module).splitlines() if not line.strip().startswith("#")]


def test_it_is_the_graph_of_the_model_on_the_cpu() -> None:
    ids = torch.randint(40, (3, 5), generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):
        model = Tied()
    with on_fake_cpu(model, ((ids,), {})) as (twin, (args, kwargs)):
        assert isinstance(twin, Tied)
        found = capture(twin, args, kwargs, train=True)
    expected = capture(Tied(), (ids,), {}, train=True)
    assert statements(found.graph.module) == statements(expected.graph.module)
    assert is_on_meta(model)
    assert not is_on_meta(twin)
    assert twin.out.weight is twin.table.weight


@pytest.mark.parametrize("train", [True, False])
def test_either_mode(train: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))
    with on_fake_cpu(model, ((torch.tensor([1, 2]),), {})) as (twin, (args, kwargs)):
        graph = capture(twin, args, kwargs, train=train).graph
    outputs = [role for _, role in graph.outputs()]
    assert len(outputs) == (4 if train else 1)
