"""Tensors and arrays that have a table's memory from before the first call: it stays whole, and they see it train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import embrace_fx
from tests.support.parts import differs
from tests.support.ranks import run_ranks
from tests.support.tagger import ROWS, Tagger

KEPT: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda weight: weight.data,
    "a row": lambda weight: weight.detach()[3],
    "a flat view": lambda weight: weight.data.view(-1),
    "an array": lambda weight: weight.detach().numpy(),
    "a state dict's": lambda weight: {"weight": weight.detach()},
    "a copy": lambda weight: weight.detach().clone(),
}


def _train(rank: int, kept: str, wrap: Callable[[nn.Module], Any], *, late: bool) -> tuple[Any, Any]:
    """What the kept tensor tells after each step, where it is written, too; and where the model ends."""
    torch.manual_seed(0)
    plain = Tagger().double()
    held: Any = None if late else KEPT[kept](plain.emb.weight)
    model = wrap(plain)
    held = KEPT[kept](plain.emb.weight) if late else held
    optimizer, told = SGD(model.parameters(), 0.5), []
    for step in range(3):
        draw = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        model(torch.randint(ROWS, (4, 3), generator=draw), torch.randint(3, (4,), generator=draw)).backward()
        optimizer.step()
        value = held["weight"] if isinstance(held, dict) else held
        told.append(float(value.sum()))
        value[2:3] = 0.25
    return told, [value.detach().clone() for value in embrace_fx.full_state_dict(model).values()]


def _both(rank: int, world_size: int, late: bool) -> dict[str, tuple[str, str, str]]:
    found = {}
    for kept in KEPT:
        compiled: list[Any] = []

        def wrap(plain: nn.Module, compiled: list[Any] = compiled) -> Any:
            compiled.append(embrace_fx.compile(plain, strategy="alltoall"))
            return compiled[0]

        ours = _train(rank, kept, wrap, late=late)
        decision = compiled[0].plan["emb.weight"]
        theirs = _train(rank, kept, DistributedDataParallel, late=late)
        found[kept] = differs(ours, theirs), decision.strategy, decision.reason
        compiled[0].close()
    return found


@pytest.mark.long
@pytest.mark.parametrize("late", [False, True], ids=["before compile", "before the first call"])
def test_who_has_a_tables_memory_sees_it_train(late: bool) -> None:
    for found in run_ranks(2, _both, late):
        for kept, (wrong, strategy, reason) in found.items():
            assert not wrong, kept
            assert strategy == ("alltoall" if kept == "a copy" else "allreduce")
            assert ("to shard it" in reason) is (kept != "a copy")
