"""References to parameters from before `compile()`: what they show, as docs/from_ddp.md says, next to DDP's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.sides import DTYPE, Matching, draw_batch

Shown = dict[str, list[Tensor]]


def _whole(value: Any) -> Tensor:
    """All of a tensor, of which a rank may have a part."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _shown(kept: dict[str, nn.Parameter], into: Shown) -> None:
    for name, parameter in kept.items():
        into.setdefault(name, []).append(_whole(parameter.detach().clone()))


def _trained(rank: int, *, compiled: bool, kind: Any) -> tuple[Shown, Shown]:
    """What references show after the first call and after each step, and their gradients after each backward."""
    torch.manual_seed(rank)  # rank 0's are what training begins with
    plain = Matching().to(DTYPE)
    kept, listed = dict(plain.named_parameters()), list(plain.parameters())
    own = kept["words.weight"].detach().clone()
    model: Any = embrace_fx.compile(plain, strategy="alltoall") if compiled else DistributedDataParallel(plain)
    optimizer = kind(listed, 0.05)
    values: dict[str, Any] = {}
    gradients: dict[str, Any] = {}
    if compiled:  # until the first call each rank has its own table
        assert torch.equal(kept["words.weight"], own)
    for step in range(4):
        loss = model(*draw_batch(step, rank))
        if step == 0:
            _shown(kept, values)
        loss.backward()
        for name, parameter in kept.items():
            assert parameter.grad is not None
            found = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            gradients.setdefault(name, []).append(_whole((found + 0).detach()))
        optimizer.step()
        optimizer.zero_grad()
        if compiled:
            model.synchronize()
        _shown(kept, values)
    if compiled:
        for (name, parameter), each in zip(model.named_parameters(), listed, strict=True):
            assert parameter is kept[name] is each
    return values, gradients


def _both(rank: int, world_size: int) -> None:
    for kind in (SGD, Adam):
        found, expected = (_trained(rank, compiled=each, kind=kind) for each in (True, False))
        torch.testing.assert_close(found, expected)


def test_references_show_what_is_written_of_them() -> None:
    run_ranks(2, _both)
