"""Values as plain data: they come back equal, and what is of another type does not come back at all."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from embrace_fx.vocabulary.operation_id import OperationId, chunk_id
from embrace_fx.vocabulary.plain_data import from_plain, to_plain


@dataclass(frozen=True)
class Inner:
    name: str
    ratio: float
    what: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Outer:
    inner: Inner | None
    many: tuple[Inner, ...]
    by_rank: dict[int, tuple[str, int]]
    notes: list[str]


VALUES: list[tuple[Any, Any]] = [
    (Outer, Outer(Inner("x", 0.1 + 0.2), (Inner("y", float("inf"), "b"),), {3: ("z", -1)}, ["ü"])),
    (Outer, Outer(None, (), {}, [])),
    (dict[str, str] | str, {"a": "b"}),
    (dict[str, str] | str, "wrong with it"),
    (tuple[int, str | None], (2, None)),
    (str | None, None),
    (dict[OperationId, float], {chunk_id(1, 2): 0.5, OperationId("own", "your code", "late"): 1.0}),
]


def sent(value: Any) -> Any:
    return json.loads(json.dumps(to_plain(value)))


@pytest.mark.parametrize(("kind", "value"), VALUES)
def test_a_value_comes_back(kind: Any, value: Any) -> None:
    assert from_plain(kind, sent(value)) == value


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("values", [[], [5, -7, 2**30]])
def test_a_tensor_of_integers_comes_back(dtype: torch.dtype, values: list[int]) -> None:
    tensor = torch.tensor(values, dtype=dtype)
    found = from_plain(Tensor | None, sent(tensor))
    assert found.dtype == dtype
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("kind", "content", "wrong"),
    [
        (int, "1", "it is '1'"),
        (int, True, "it is 'True'"),
        (Inner, {"name": "x", "ratio": "y"}, "it.ratio is 'y'"),
        (Inner, {"name": "x", "ratio": 1.0, "what": "c"}, "it.what is 'c'"),
        (Inner, {"name": "x", "ratio": 1.0, "__class__": "os"}, "has unknown fields"),
        (tuple[int, int], [1], "it has 1 values, but must have 2"),
        (dict[str, int], [["a"]], "it has 1 values, but must have 2"),
        (Tensor, ["float64", ""], "not a tensor of integers"),
        (Tensor, ["int64", "AAA"], "not a tensor of integers"),
        (Outer, pickle.dumps([1]).decode("latin-1"), "it is "),
    ],
)
def test_what_is_of_another_type_is_refused(kind: Any, content: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        from_plain(kind, content)


def test_a_missing_field_is_refused() -> None:
    with pytest.raises(ValueError, match="it lacks a field"):
        from_plain(Inner, {"name": "x"})
