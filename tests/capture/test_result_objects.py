"""Results inside of objects: opened into tensors for the trace, and made whole again for every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.capture.errors import CaptureError


@dataclass
class Layer:
    keys: Tensor
    dtype: torch.dtype


class Cache:
    def __init__(self, layers: list[Layer]) -> None:
        self.layers = layers
        self.kind = Layer
        self.length = 3
        self.settings = Settings()


class Settings:
    """An object without any tensor."""


class Slotted:
    __slots__ = ("keys",)

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class _Returns(nn.Module):
    """Returns its rows as an attribute of an object."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.kind = kind

    def forward(self, ids: Tensor) -> Any:
        rows = self.table(ids)
        return self.kind(rows) if self.kind is Slotted else Cache([Layer(rows, rows.dtype)])


def test_every_call_returns_an_object_of_its_own_that_takes_gradients() -> None:
    model = _Returns(Cache)
    compiled = embrace_fx.compile(model)
    first, second = compiled(torch.tensor([1, 2])), compiled(torch.tensor([3, 3]))
    assert first.layers[0].keys.tolist() == model.table.weight[[1, 2]].tolist()
    assert second.layers[0].keys.tolist() == model.table.weight[[3, 3]].tolist()
    second.layers[0].keys.sum().backward()
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.sum(1).tolist() == [0, 0, 0, 8, 0, 0, 0, 0, 0, 0]


def test_tensors_in_slots_are_refused() -> None:
    with pytest.raises(CaptureError, match="Slotted"):
        embrace_fx.compile(_Returns(Slotted), route="graph")(torch.tensor([1, 2]))
