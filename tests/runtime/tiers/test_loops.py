"""What training loops do to tables beyond memory: the same losses as in memory, to the bit."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.tiers import COLUMNS, ROWS


class TwoTables(nn.Module):
    """A table that two lookups read, and one of bags."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(ROWS, COLUMNS), nn.EmbeddingBag(ROWS, COLUMNS, mode="sum")
        self.linear, self.dropout = nn.Linear(COLUMNS, 1), nn.Dropout(0.2)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        hidden = torch.tanh(self.words(first)).sum(1) + torch.tanh(self.words(second)).sum(1) + self.bags(first)
        loss: Tensor = self.linear(self.dropout(hidden)).square().mean()
        return loss


def train(rank: int, world_size: int, memory: Any, habit: str) -> list[float]:
    """Losses, and what clipping returns; at the end of an evaluation that reads every row."""
    torch.manual_seed(0)
    model = TwoTables()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    asked: Any = {"table_memory": memory, "tables_in": tempfile.gettempdir()} if memory else {}
    compiled = embrace_fx.compile(model, optimizer=optimizer, strategy="alltoall", row_updates="replay", **asked)
    generator, seen = torch.Generator().manual_seed(rank), []
    batches: Any = [(ROWS ** torch.rand(2, 4, 3, generator=generator) - 1).long().unbind() for _ in range(24)]
    for step, batch in enumerate(compiled.lookahead(batches, 3)):
        sums = habit == "accumulate" and step % 3 != 2
        with compiled.no_sync() if sums else contextlib.nullcontext():
            loss = compiled(*batch)
            loss.backward()
        seen.append(loss.item())
        if sums:
            continue
        if habit == "clip":
            seen.append(float(nn.utils.clip_grad_norm_(compiled.parameters(), 0.05)))
        if habit == "skip" and step % 4 == 1:
            optimizer.zero_grad()
            continue
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if habit == "ask" and step % 5 == 0:
            compiled.synchronize()
        if habit == "evaluate" and step % 6 == 0:
            seen.append(_evaluated(compiled, batches[:1])[0])
    seen += _evaluated(compiled, [(ids[None], ids[None].flip(1)) for ids in torch.arange(ROWS).split(10)])
    compiled.close()
    return seen


def _evaluated(compiled: nn.Module, batches: Any) -> list[float]:
    compiled.eval()
    with torch.no_grad():
        found = [compiled(*batch).item() for batch in batches]
    compiled.train()
    return found


@pytest.mark.long
@pytest.mark.parametrize("memory", [0.4, {"words.*": 0.4}], ids=["both", "one"])
@pytest.mark.parametrize("habit", ["clip", "accumulate", "skip", "ask", "evaluate"])
def test_loop_does_what_it_does_in_memory(habit: str, memory: float | Mapping[str, float]) -> None:
    assert run_ranks(2, train, memory, habit) == run_ranks(2, train, None, habit)


def test_table_named_where_none_is_is_an_error() -> None:
    with pytest.raises(Exception, match=r"found 'nothing\*', which no parameter matches"):
        run_ranks(1, train, {"nothing*": 0.4}, "")


def joins(rank: int, world_size: int) -> str:
    model = TwoTables()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = embrace_fx.compile(model, optimizer=optimizer, table_memory=0.5, tables_in=tempfile.gettempdir())
    with pytest.raises(ValueError, match="model without table_memory, in join") as refused, compiled.join():
        raise AssertionError("a rank has come in")
    return str(refused.value)


def test_joining_is_refused_before_the_first_batch() -> None:
    assert len(set(run_ranks(2, joins))) == 1
