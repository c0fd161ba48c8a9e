"""`torch.compile` around a compiled model: it runs as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(100, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.table(ids)).square().mean()


def losses(wrap: Callable[[nn.Module, SGD], Any]) -> list[float]:
    torch.manual_seed(0)
    model = Words()
    optimizer = SGD(model.parameters(), 0.1)
    wrapped, found = wrap(model, optimizer), []
    for _ in range(3):
        loss = wrapped(torch.arange(6))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_compiled_model_inside_of_torch_compile_trains_as_it_does_outside() -> None:
    plain = losses(lambda model, _: model)
    twice = losses(lambda model, opt: torch.compile(embrace_fx.compile(model, optimizer=opt), backend="aot_eager"))
    assert twice == plain
