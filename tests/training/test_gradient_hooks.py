"""Hooks on parameters' gradients, parameters frozen and thawed on the way: as under DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import embrace_fx
from tests.support.ranks import run_ranks, run_ranks_expecting_errors

DTYPE = torch.float64
NUM_IDS, DIM = 12, 4


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(NUM_IDS, DIM)
        self.hidden = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.out(torch.tanh(self.hidden(self.ids(ids)))).square().mean()
        return loss


def _ids(rank: int, step: int) -> Tensor:
    return torch.randint(NUM_IDS, (6,), generator=torch.Generator().manual_seed(10 * step + rank))


Loop = Callable[[int, Any, nn.Module, Callable[[], None]], None]


def _trained(rank: int, wrap: Callable[[nn.Module], Any], loop: Loop) -> list[dict[str, Tensor]]:
    torch.manual_seed(0)
    plain = Scored().to(DTYPE)
    model = wrap(plain)
    optimizer = SGD(plain.parameters(), 0.1, momentum=0.9)
    found: list[dict[str, Tensor]] = []

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        state = embrace_fx.full_state_dict(plain)
        found.append({name: value.detach().clone() for name, value in state.items()})

    loop(rank, model, plain, step)
    return found


def _scale(by: float, parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(by)


def hooks(rank: int, model: Any, plain: nn.Module, step: Callable[[], None]) -> None:
    """Of all kinds, before and after the first call, of a table too; each sees this rank's own gradient."""
    seen: list[float] = []
    plain.get_parameter("hidden.weight").register_hook(lambda g: g.clamp(-0.01, 0.01))
    plain.get_parameter("out.weight").register_post_accumulate_grad_hook(partial(_scale, rank + 1.0))
    for k in range(5):
        if k == 2:
            plain.get_parameter("ids.weight").register_hook(lambda g: g * (3.0 - rank))
            handle = plain.get_parameter("out.bias").register_hook(lambda g: seen.append(float(g)))
        if k == 4:
            handle.remove()
        if k % 2:
            with model.no_sync():
                model(_ids(rank, 50 + k)).backward()
        model(_ids(rank, k)).backward()
        step()
    plain.register_buffer("seen", torch.tensor([*seen, float(len(seen))], dtype=DTYPE))
    step()


def frozen_and_thawed(rank: int, model: Any, plain: nn.Module, step: Callable[[], None]) -> None:
    """From the beginning, or later; a layer, a table."""
    plain.out.bias.requires_grad_(False)  # type: ignore[union-attr]
    for k in range(6):
        if k == 1:
            plain.hidden.requires_grad_(False)
        if k == 2:
            plain.ids.requires_grad_(False)
        if k == 4:
            plain.requires_grad_(True)
        model(_ids(rank, k)).backward()
        step()


def _compared(rank: int, world_size: int, loop: Loop, options: dict[str, Any]) -> None:
    expected = _trained(rank, lambda m: DistributedDataParallel(m, find_unused_parameters=True), loop)
    found = _trained(rank, lambda m: embrace_fx.compile(m, **options), loop)
    for k, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, msg=partial("step {}: {}".format, k))


@pytest.mark.parametrize("options", [{"schedule": "none"}, {"strategy": {"ids.weight": "alltoall"}}])
def test_hooks_see_and_change_a_ranks_own_gradient(options: dict[str, Any]) -> None:
    run_ranks(2, _compared, hooks, options)


def _averaging(rank: int, model: Any, plain: nn.Module, step: Callable[[], None]) -> None:
    """The plain model, its gradients averaged by hand: DDP knows only what trains when it is made."""

    def averaged_step() -> None:
        for parameter in plain.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        step()

    frozen_and_thawed(rank, model, plain, averaged_step)


def _freezes(rank: int, world_size: int, options: dict[str, Any]) -> None:
    expected = _trained(rank, lambda m: m, _averaging)
    found = _trained(rank, lambda m: embrace_fx.compile(m, **options), frozen_and_thawed)
    for k, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, msg=partial("step {}: {}".format, k))


@pytest.mark.parametrize(
    "options", [{"schedule": "none"}, pytest.param({"strategy": {"ids.weight": "alltoall"}}, marks=pytest.mark.long)]
)
def test_parameters_may_be_frozen_and_thawed(options: dict[str, Any]) -> None:
    run_ranks(2, _freezes, options)


def _steps_in_backward(rank: int, world_size: int) -> None:
    plain = Scored()
    node = torch.autograd.graph.get_gradient_edge(plain.out.bias).node
    node.register_hook(lambda *_: None)
    embrace_fx.compile(plain)


def test_hooks_of_autograds_nodes_are_refused() -> None:
    errors = run_ranks_expecting_errors(2, _steps_in_backward)
    assert all("has a hook on the autograd node" in str(error) for error in errors)
    assert all("out.bias" in str(error) for error in errors)
