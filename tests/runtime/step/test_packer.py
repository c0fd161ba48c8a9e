"""A bucket's memory is taken again in a later step, unless something of an earlier one refers to it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.runtime.step.packer import Packer
from embrace_fx.runtime.tables.model_state import ModelState
from tests.support.ranks import run_ranks

NAMES = ("0.weight", "0.bias")


def packer(*, keeps_memory: bool = True) -> Packer:
    return Packer(ModelState(nn.Sequential(nn.Linear(2, 2))), NAMES, scales=True, keeps_memory=keeps_memory)


def gradients(value: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full((2, 2), value, dtype=dtype), torch.full((2,), value + 1, dtype=dtype)]


@pytest.mark.parametrize("keeps_memory", [True, False])
@pytest.mark.parametrize("scale", [0.5, 1.0])
def test_a_bucket_of_one_gradient_is_a_tensor_of_its_own(scale: float, keeps_memory: bool) -> None:
    pack, gradient = packer(keeps_memory=keeps_memory), torch.full((2, 2), 3.0)
    for _ in range(2):
        flat = pack([gradient], scale)
        assert flat.tolist() == [3.0 * scale] * 4
        flat.zero_()  # like a reduction in place
        assert gradient.eq(3.0).all()
        del flat


@pytest.mark.parametrize("held", ["itself", "a part of it", "an array"])
def test_memory_that_something_holds_is_left_alone(held: str) -> None:
    pack = packer()
    flat = pack(gradients(2.0), 0.5)
    holder: Any = {"itself": flat, "a part of it": flat.as_strided((2,), (1,), 4), "an array": flat[:2].numpy()}[held]
    before = holder.tolist()
    del flat
    again = pack(gradients(4.0), 0.5)
    assert holder.tolist() == before
    assert again.tolist() == [2.0, 2.0, 2.0, 2.0, 2.5, 2.5]


def test_a_packer_that_keeps_nothing_frees_its_memory() -> None:
    pack = packer(keeps_memory=False)
    flat = pack(gradients(2.0), 0.5)
    pack(gradients(4.0), 0.5)
    gc.collect()
    assert flat.tolist() == [1.0, 1.0, 1.0, 1.0, 1.5, 1.5]
    assert not [each for each in vars(pack).values() if isinstance(each, Tensor)]


def _kept_gradients(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], bool]:
    """Trains as written; returns gradients noted when they came, the same held since, and whether memory came again."""
    torch.manual_seed(0)
    model: Any = embrace_fx.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), route="eager")
    noted, held, places = list[Tensor](), list[Tensor](), list[int]()
    for step in range(12):
        model.zero_grad()
        model(torch.full((3, 4), float(step + rank))).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            if step in (6, 8):
                noted.append(parameter.grad.clone())
                held.append(parameter.grad)
        places.append(next(model.parameters()).grad.data_ptr())
    model.close()
    return noted, held, places[4] == places[5]


def test_gradients_that_a_loop_holds_stay_as_they_were() -> None:
    for noted, held, came_again in run_ranks(2, _kept_gradients):
        assert came_again
        assert len(noted) == 8
        for before, after in zip(noted, held, strict=True):
            assert torch.equal(before, after)


def _held_while_accumulating(rank: int, world_size: int) -> list[bool]:
    model: Any = embrace_fx.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), route="graph")
    with model.no_sync():
        model(torch.ones(3, 4)).square().mean().backward()
    held = [parameter.grad for parameter in model.parameters()]
    model(torch.ones(3, 4) + rank).square().mean().backward()
    return [parameter.grad is each for parameter, each in zip(model.parameters(), held, strict=True)]


def test_accumulated_gradients_stay_the_tensors_that_a_loop_holds() -> None:
    assert run_ranks(2, _held_while_accumulating) == [[True] * 4] * 2
