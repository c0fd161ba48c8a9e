"""A table's optimizer state is never whole on a rank: as it is made, stepped, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import embrace_fx
from embrace_fx.runtime.tables.part import Part
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from tests.support.ranks import run_ranks

ROWS, WIDTH = 64_000, 32
WHOLE_BYTES = 4 * ROWS * WIDTH


class OneTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids_B: Tensor) -> Tensor:
        return self.linear(self.table(ids_B)).square().mean()


class Largest(TorchDispatchMode):
    """Watches what operations make of memory: views, and files that are mapped into it, are none.

    Attributes:
        bytes: of the largest tensor.
        made_by: the operation that has made it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes, self.made_by = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        known = set(map(_address, _plain_tensors((args, kwargs))))
        for made in _plain_tensors(found):
            size = made.untyped_storage().nbytes()
            if size > self.bytes and _address(made) not in known and "set_" not in str(func):
                self.bytes, self.made_by = size, str(func)
        return found


def _plain_tensors(values: Any) -> list[Tensor]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return [value for value in tensors if type(value) in (Tensor, nn.Parameter) and value.device.type == "cpu"]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Run:
    def __init__(self, row_updates: RowUpdatesOption, rank: int) -> None:
        with torch.device("meta"):
            self.plain = OneTable()
        self.model = embrace_fx.compile(self.plain, strategy={"table.weight": "alltoall"}, row_updates=row_updates)
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=0.1, amsgrad=True)
        self.rank = rank
        self._backward(0)  # the capture is none of the watch's
        self.optimizer.zero_grad()

    def _backward(self, step: int) -> None:
        self.model(torch.arange(5) + 7 * step + self.rank).backward()

    def train(self, *steps: int) -> None:
        for step in steps:
            self._backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()


def _own_shape(value: Any) -> tuple[int, ...]:
    """Of what this rank holds of a tensor."""
    return tuple(value.to_local().shape if isinstance(value, Part) else value.shape)


def _save_and_load(
    rank: int, world_size: int, row_updates: RowUpdatesOption, directory: Path
) -> dict[str, tuple[int, str]]:
    first, second, third = (Run(row_updates, rank) for _ in range(3))
    with Largest() as training:
        first.train(1, 2, 3)
    with Largest() as saving:
        embrace_fx.save_full_state_dict(first.optimizer, directory / "file.pt")
        weights, state = get_state_dict(first.plain, first.optimizer)
        save({"model": weights, "optimizer": state}, checkpoint_id=directory / "shards")
    with Largest() as loading_file:
        second.optimizer.load_state_dict(torch.load(directory / "file.pt", mmap=True))
        second.train(4)
    with Largest() as loading_shards:
        weights, state = get_state_dict(third.plain, third.optimizer)
        stored: dict[str, Any] = {"model": weights, "optimizer": state}
        load(stored, checkpoint_id=directory / "shards")
        set_state_dict(
            third.plain, third.optimizer, model_state_dict=stored["model"], optim_state_dict=stored["optimizer"]
        )
        third.train(4)
    for run in (first, second, third):
        held = run.optimizer.state[run.plain.table.weight]
        parts = {name for name, value in held.items() if _own_shape(value) == (ROWS, WIDTH // world_size)}
        assert parts == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        assert not any(isinstance(value, DTensor) for value in held.values())
    watched = {"training": training, "saving": saving, "loading a file": loading_file, "loading shards": loading_shards}
    return {what: (watch.bytes, watch.made_by) for what, watch in watched.items()}


@pytest.mark.long
@pytest.mark.parametrize("row_updates", ["replay", "sweep"])
def test_no_rank_makes_a_whole_tables_state(row_updates: RowUpdatesOption, tmp_path: Path) -> None:
    for found in run_ranks(2, _save_and_load, row_updates, tmp_path):
        for what, (made_bytes, made_by) in found.items():
            assert 0 < made_bytes < 0.6 * WHOLE_BYTES, f"{what}: {made_by} makes {made_bytes} of {WHOLE_BYTES} bytes"
