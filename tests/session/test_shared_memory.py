"""Two Parameters on one storage are found and refused; whatever only looks alike is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.setup.model_checks import share_memory
from tests.support.ranks import run_ranks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6)
        self.out = nn.Linear(6, 40, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.out(self.words(ids_BT)).square().mean()


def _refused(rank: int, world_size: int) -> list[str]:
    told = []
    model: Any = Tied()
    if rank == 1:
        model.out.weight.data = model.words.weight.data
    with pytest.raises(ValueError, match="two parameters whose memory") as raised:
        embrace_fx.compile(model)
    told.append(str(raised.value))
    model = Tied()
    compiled = embrace_fx.compile(model)
    model.out.weight.data = model.words.weight.data
    with pytest.raises(ValueError, match="two parameters whose memory"):
        compiled(torch.zeros((2, 3), dtype=torch.long))
    model.out.weight.data = model.words.weight.data.clone()
    compiled(torch.zeros((2, 3), dtype=torch.long)).backward()
    return told


def test_two_parameters_on_one_storage_are_refused_on_every_rank() -> None:
    for (told,) in run_ranks(2, _refused):
        assert "rank 1" in told
        assert "words.weight and out.weight are two parameters whose memory is the same" in told
        assert "\n" not in told


def test_a_parameter_that_overlaps_another_or_a_buffer_is_refused() -> None:
    model: Any = Tied()
    rows = torch.zeros(60, 6)
    model.words.weight.data, model.out.weight.data = rows[:40], rows[20:]
    with pytest.raises(ValueError, match=r"words\.weight and out\.weight are two parameters whose memory overlaps"):
        embrace_fx.compile(model)
    model = Tied()
    model.register_buffer("first_row", model.words.weight.data[0])
    with pytest.raises(ValueError, match=r"words\.weight and first_row are two parameters whose memory overlaps"):
        embrace_fx.compile(model)


def trained(model: nn.Module, plain: Any) -> list[Tensor]:
    """The loss, and the plain model's gradients and values after two steps; `model`: its compiled form, or itself."""
    optimizer = SGD([each for each in plain.parameters() if each.requires_grad], lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        loss = model(torch.tensor([[1, 2, 3], [3, 4, 5 + step]]))
        loss.backward()
        optimizer.step()
    found = [loss.detach(), *plain.parameters()]
    return found + [each.grad for each in plain.parameters() if each.grad is not None]


def assert_trains_as_itself(model: Any) -> None:
    """Compares the compiled model with a copy whose parameters share no memory."""
    plain = copy.deepcopy(model)
    for each in plain.parameters():
        each.data = each.data.clone()
    expected = trained(plain, plain)
    found = trained(embrace_fx.compile(model), model)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_parameters_cut_out_of_one_storage_are_their_own() -> None:
    model: Any = Tied()
    rows = torch.randn(80, 6)
    model.words.weight.data, model.out.weight.data = rows[:40], rows[40:]
    assert_trains_as_itself(model)
    model = Tied()
    columns = torch.randn(40, 12)
    model.words.weight.data, model.out.weight.data = columns[:, :6], columns[:, 6:]
    assert_trains_as_itself(model)


class TiedAndMore(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.out(self.inner(self.words(ids_BT))).square().mean()


def test_frozen_parameters_may_share_memory() -> None:
    model: Any = TiedAndMore()
    model.out.weight.data = model.words.weight.data
    model.out.weight.requires_grad_(False)
    model.words.weight.requires_grad_(False)
    assert_trains_as_itself(model)


def test_tensors_of_other_strides() -> None:
    table = torch.zeros(4, 6)
    assert share_memory(table, table.T)
    assert share_memory(table[::2], table[2:])
    assert not share_memory(table[::2], table[1::2])
    assert not share_memory(table[:0], table)
