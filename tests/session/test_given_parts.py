"""Whole tensors that are given a part of a table, or a gradient in flight: as under DDP, or refused, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

import embrace_fx
from tests.support.beside import check, ids, run
from tests.support.ranks import run_ranks
from tests.support.scenario import compiled_once
from tests.support.tagger import Scorer

ROWS, WIDTH = 40, 6
_tagger = partial(Scorer, ROWS, WIDTH, scores=3)
Given = Callable[[Tensor, Any], Tensor]
"""(a whole tensor of the table's shape, the plain model) -> what is compared."""


def _soft(target: Tensor, model: Any) -> Tensor:
    target.data = 0.1 * model.words.weight.data + 0.9 * target.data
    return target


def _of_a_parameter(target: Tensor, model: Any) -> Tensor:
    made = nn.Parameter(target.clone())
    made.data = 0.1 * model.words.weight.detach() + 0.9 * made.data
    made.square().sum().backward()
    assert made.grad is not None
    return made.grad


def _clone(target: Tensor, model: Any) -> Tensor:
    target.data = model.words.weight.data.clone()
    return target


def _row(_: Tensor, model: Any) -> Tensor:
    row = torch.zeros(WIDTH)
    row.data = model.words.weight.data[3] * 2
    return row


def _transposed(_: Tensor, model: Any) -> Tensor:
    turned = torch.zeros(WIDTH, ROWS)
    turned.data = model.words.weight.data.t() * 2
    return turned


def _buffer(target: Tensor, model: Any) -> Tensor:
    layer = nn.Module()
    layer.register_buffer("kept", target)
    layer.kept.data = model.words.weight.grad * 3
    model.words.weight.grad.zero_()
    return layer.kept  # type: ignore[return-value]


def _dense(_: Tensor, model: Any) -> Tensor:
    kept = torch.zeros(3, WIDTH)
    kept.data = model.out.weight.grad
    model.out.weight.grad.mul_(2.0)  # also scales `kept`, which shares the memory
    return kept


def _in_inference(target: Tensor, model: Any) -> Tensor:
    with torch.inference_mode():
        made = torch.zeros(ROWS, WIDTH)
        made.data = model.words.weight.data * 2
        return made + target


def _alias(target: Tensor, model: Any) -> Tensor:
    target.data = model.words.weight.data
    return target


def _itself(target: Tensor, model: Any) -> Tensor:
    target.data = model.words.weight
    return target


def _gradient(target: Tensor, model: Any) -> Tensor:
    target.data = model.words.weight.grad
    return target


def _kept(target: Tensor, model: Any) -> Tensor:
    kept = 0.1 * model.words.weight.data
    target.data = kept
    kept.mul_(2.0)
    return target


def _set(target: Tensor, model: Any) -> Tensor:
    return target.set_(model.words.weight.data)


def _storage(target: Tensor, model: Any) -> Tensor:
    return target.set_(Tensor.untyped_storage(model.words.weight), 0, (4,), (1,))


def _storage_of_data(target: Tensor, model: Any) -> Tensor:
    return target.set_(Tensor.untyped_storage(model.words.weight.data))


def _storage_in_flight(target: Tensor, model: Any) -> Tensor:
    return target.set_(Tensor.untyped_storage(model.out.weight.grad))


def _shared_storage(target: Tensor, model: Any) -> Tensor:
    Tensor.untyped_storage(model.words.weight).share_memory_()
    return target


ANSWERED: dict[str, Given] = {
    each.__name__: each for each in (_soft, _of_a_parameter, _clone, _row, _transposed, _buffer, _dense, _in_inference)
}
REFUSED: dict[str, Given] = {each.__name__: each for each in (_alias, _itself, _gradient, _kept, _set)}
STORAGES = {each.__name__: each for each in (_storage, _storage_of_data, _storage_in_flight, _shared_storage)}


def _loop(given: Given) -> Callable[[Any, int], list[Tensor]]:
    def loop(model: Any, rank: int) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
        target, found = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH), []
        for step in range(3):
            model(ids(step, rank, 4, 3, high=ROWS)).backward()
            with torch.set_grad_enabled(given is _of_a_parameter):
                found.append(given(target, model.module).detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        return found

    return loop


CASES = {name: (_tagger, _loop(given)) for name, given in ANSWERED.items()}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_tensor_given_what_nobody_keeps_is_as_under_ddp(ranks: int) -> None:
    check(__name__, ranks=ranks, once=True, strategy="alltoall", rtol=1e-5)


def _refused(rank: int, world_size: int, cases: dict[str, Given]) -> dict[str, str]:
    sharded, told = compiled_once(strategy="alltoall"), {}
    for name, given in cases.items():
        with pytest.raises((RuntimeError, TypeError)) as caught:
            run(sharded, (_tagger, _loop(given)), rank)
        told[name] = str(caught.value)
    return told


def test_a_tensor_cannot_share_memory_with_a_part_that_is_kept() -> None:
    for told in run_ranks(2, _refused, REFUSED):
        for line in told.values():
            assert "x is in use elsewhere" in line
            assert "tensor.data.copy_(x)" in line


def test_a_tensor_is_not_given_the_storage_of_what_has_no_memory() -> None:
    """The next read of that tensor would crash the process."""
    for told in run_ranks(2, _refused, STORAGES):
        for line in told.values():
            assert "has no memory of its own" in line


def _raw(rank: int, world_size: int) -> str:
    model = embrace_fx.compile(_tagger(), strategy="alltoall")
    model(torch.arange(6).view(2, 3))
    with pytest.raises(RuntimeError) as caught:
        to_dlpack(model.get_parameter("words.weight").data)
    return str(caught.value)


def test_what_reads_memory_below_torch_ends_in_an_error() -> None:
    assert all("data pointer" in line for line in run_ranks(2, _raw))


def _load(rank: int, world_size: int) -> list[bool]:
    model, whole = embrace_fx.compile(_tagger(), strategy="alltoall"), torch.linspace(-1, 1, ROWS * WIDTH)
    model(torch.arange(6).view(2, 3))
    mesh, equal = init_device_mesh("cpu", (world_size,)), []
    for k, placement in enumerate((Shard(1), Shard(0), Replicate())):
        value = whole.view(ROWS, WIDTH) + k
        model.load_state_dict(model.state_dict() | {"words.weight": distribute_tensor(value, mesh, [placement])})
        equal.append(torch.equal(_clone(torch.zeros(ROWS, WIDTH), model), value))
    return equal


def test_a_table_is_loaded_from_a_tensor_of_any_placement() -> None:
    assert run_ranks(2, _load) == [[True] * 3] * 2
