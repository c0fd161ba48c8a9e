"""Tensors and arrays that have a table's memory from before the first call: it stays whole, and they see it train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.optim import SGD

from tests.support.beside import Case, check
from tests.support.tagger import Tagger, batch_of

KEPT: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda weight: weight.data,
    "a row": lambda weight: weight.detach()[3],
    "a flat view": lambda weight: weight.data.view(-1),
    "an array": lambda weight: weight.detach().numpy(),
    "a state dict's": lambda weight: {"weight": weight.detach()},
    "a copy": lambda weight: weight.detach().clone(),
}
HELD: list[Any] = []
"""What is kept of the model that is trained."""


def _made(kept: str) -> nn.Module:
    plain = Tagger().double()
    HELD[:] = [KEPT[kept](plain.emb.weight)]
    return plain


def _case(kept: str, *, late: bool) -> Case:
    def train(model: Any, rank: int) -> list[float]:
        """Returns the sum of the kept tensor after each step, and then writes one of its rows."""
        held = KEPT[kept](model.module.emb.weight) if late else HELD[0]
        optimizer, told = SGD(model.parameters(), 0.5), []
        for step in range(3):
            optimizer.zero_grad()
            model(*batch_of(step, rank)).backward()
            optimizer.step()
            value = held["weight"] if isinstance(held, dict) else held
            told.append(float(value.sum()))
            value[2:3] = 0.25
        return told

    return (lambda: Tagger().double()) if late else partial(_made, kept), train


CASES = {f"{kept}, {late}": _case(kept, late=late) for kept in KEPT for late in (False, True)}


@pytest.mark.long
@pytest.mark.parametrize("late", [False, True], ids=["before compile", "before the first call"])
def test_who_has_a_tables_memory_sees_it_train(late: bool) -> None:
    check(
        __name__,
        *(f"{kept}, {late}" for kept in KEPT if kept != "a copy"),
        strategy="alltoall",
        says="to shard the table",
    )
    check(__name__, f"a copy, {late}", strategy="alltoall", says="alltoall")
