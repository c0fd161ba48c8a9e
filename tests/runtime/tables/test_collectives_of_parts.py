"""Every function of torch.distributed refuses a part of a table, on every rank, in words that name it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from embrace_fx.runtime.tables.table_shard import TableShard
from tests.support.parts import Parts
from tests.support.ranks import run_ranks


def _arguments(rank: int, part: TableShard, name: str, function: Callable[..., Any]) -> dict[str, Any] | None:
    """Returns the arguments for a function of torch.distributed, or None if the function takes no tensors."""
    names = inspect.signature(function).parameters
    plain = torch.zeros(part.shape, dtype=part.dtype)
    given: dict[str, Any] = {
        **dict.fromkeys(("tensor", "input_tensor", "input", "obj", "object"), part),
        **dict.fromkeys(("output_tensor", "output"), torch.cat([plain, plain]) if "gather" in name else plain),
        **{key: [part] for key in ("tensors", "inputs")},
        **{key: [plain, plain.clone()] for key in ("tensor_list", "gather_list", "output_tensor_list")},
        **{key: [part, part] for key in ("scatter_list", "input_list", "input_tensor_list", "object_list")},
        **{key: [part, part] for key in ("object_gather_list", "scatter_object_input_list")},
        "output_tensor_lists": [[plain, plain.clone()]],
        "scatter_object_output_list": [None],
    }
    if not any(each in given for each in names):
        return None
    found = {each: given[each] for each in names if each in given}
    if rank and name in ("gather", "gather_object"):
        found |= dict.fromkeys({"gather_list", "object_gather_list"}.intersection(names))
    if rank and name == "scatter":
        found["scatter_list"] = None
    peers = {"dst": 1 - rank if "send" in name else 0, "src": 1 - rank if "recv" in name else 0}
    return {**found, **{key: value for key, value in peers.items() if key in names}}


def _functions(rank: int, world_size: int) -> dict[str, str]:
    """Returns what each function of torch.distributed does with a shard instead of raising an error."""
    parts, wrong, count = Parts(), {}, 0
    for name in sorted(set(dir(dist)) - _ONLY_RECEIVED):
        function = getattr(dist, name)
        if type(function) is not FunctionType or name.startswith("_"):
            continue
        part = parts.parameter(torch.randn((6, 5), dtype=torch.float64))
        if (given := _arguments(rank, part, name, function)) is None:
            continue
        count += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # some of torch's functions are deprecated
                function(**given)
            wrong[name] = "no error"
        except (RuntimeError, TypeError) as error:
            if "sharded t.weight" not in str(error):
                wrong[name] = f"{type(error).__name__}: {error}"
    parts.close()
    assert count > 20
    return wrong


_ONLY_RECEIVED = frozenset({"broadcast_object_list", "recv_object_list", "scatter_object_list"})
"""Some rank gives them nothing that it has."""


def test_functions_of_torch_distributed_refuse_parts() -> None:
    for wrong in run_ranks(2, _functions):
        assert not wrong
