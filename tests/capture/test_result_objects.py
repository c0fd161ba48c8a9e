"""Results inside of objects: opened into tensors for the trace, and made whole again for every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import embrace_fx
from embrace_fx.capture.errors import CaptureError
from embrace_fx.capture.result_objects import open_objects


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
    """No tensor inside."""


class Slotted:
    __slots__ = ("keys",)

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


def test_an_object_is_made_again_of_other_tensors() -> None:
    cache = Cache([Layer(torch.zeros(2), torch.float32), Layer(torch.ones(2), torch.float64)])
    leaves, spec = pytree.tree_flatten(open_objects({"loss": torch.ones(()), "cache": cache}))
    assert [leaf.shape if isinstance(leaf, Tensor) else leaf for leaf in leaves] == [(), (2,), (2,), 3]
    made = pytree.tree_unflatten([torch.ones(()), torch.full((4,), 5.0), torch.full((4,), 6.0), 7], spec)["cache"]
    assert type(made) is Cache
    assert made is not cache
    assert [type(layer) for layer in made.layers] == [Layer, Layer]
    assert [layer.keys.tolist() for layer in made.layers] == [[5.0] * 4, [6.0] * 4]
    assert [layer.dtype for layer in made.layers] == [torch.float32, torch.float64]
    assert (made.kind, made.length) == (Layer, 7)
    assert made.settings is cache.settings


def test_equal_results_have_equal_specs() -> None:
    """The forward is traced more than once, and makes other objects each time."""
    _, first = pytree.tree_flatten(open_objects(Cache([Layer(torch.zeros(2), torch.float32)])))
    _, second = pytree.tree_flatten(open_objects(Cache([Layer(torch.ones(2), torch.float32)])))
    assert first == second


@pytest.mark.parametrize("value", [torch.ones(2), 3, 0.5, "text", None, True], ids=str)
def test_what_is_no_object_stays_as_it_is(value: Any) -> None:
    assert open_objects(value) is value


class _Returns(nn.Module):
    """Returns its rows inside of an object."""

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
