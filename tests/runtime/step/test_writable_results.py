"""Results that are written in place after the call: as eager, or refused; never a wrong gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import embrace_fx

DIM = 4


class Views(nn.Module):
    """A model whose results are views of an intermediate value."""

    def __init__(self, view: Callable[[Tensor], Tensor | tuple[Tensor, ...]], *, saved: bool = False) -> None:
        super().__init__()
        self.ids = nn.Embedding(6, DIM)
        self.linear = nn.Linear(DIM, DIM)
        self.view, self.saved = view, saved

    def forward(self, ids: Tensor) -> Tensor | tuple[Tensor, ...]:
        computed = self.linear(self.ids(ids))
        return self.view(computed.exp() if self.saved else computed)


def _flat(x: Tensor) -> Tensor:
    return x.view(-1, DIM // 2)


def _first(x: Tensor) -> Tensor:
    return x[:, 0]


def _turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def _halves(x: Tensor) -> tuple[Tensor, ...]:
    return x.chunk(2, dim=-1)


def _trained(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for ids in (torch.tensor([1, 2, 1]), torch.tensor([5, 5, 0])):
        result = call(ids)
        result += 1
        result[0].mul_(3)
        result.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(result.detach().clone())
    return [*found, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("view", [_flat, _first, _turned])
def test_a_view_may_be_written(view: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain = Views(view)
    model = embrace_fx.compile(copy.deepcopy(plain))
    torch.testing.assert_close(_trained(model, model), _trained(plain, plain))


def test_a_view_of_what_the_backward_reads_may_not() -> None:
    model = embrace_fx.compile(Views(_flat, saved=True))
    result = model(torch.tensor([1, 2]))
    result.mul_(2)
    with pytest.raises(RuntimeError, match=r"written in place after the forward.*a result"):
        result.sum().backward()


def test_views_of_one_memory_are_results_of_their_own() -> None:
    torch.manual_seed(0)
    plain = Views(_halves)
    model = embrace_fx.compile(copy.deepcopy(plain))
    first, second = model(torch.tensor([1, 2]))
    (first.mul_(2) + second).square().sum().backward()
    first, second = plain(torch.tensor([1, 2]))
    (first * 2 + second).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_nothing_but_autograd_holds_a_result() -> None:
    """If its own backward referred to a result, memory would be freed only by the garbage collector."""
    model = embrace_fx.compile(Views(_flat, saved=True))
    result = model(torch.tensor([1, 2]))
    storage = StorageWeakRef(result.untyped_storage())
    del result
    assert storage.expired()
