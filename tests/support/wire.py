"""Bytes that ranks send each other, counted at their network interfaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.runtime.probe import wire
from tests.support.models import Workload
from tests.support.ranks import run_ranks

TOLERANCE = 0.05

WARM_UP_STEPS = 2

STEPS = 4

Counter = Callable[[], dict[int, int]]
"""Bytes sent so far, by what counts them: connections of earlier tests may go while the others are watched."""


def sent_by_connection() -> dict[int, int]:
    """Payload bytes that this process has sent over the TCP connections it has open, each byte once."""
    sent = wire.sent_by_connection()
    assert sent is not None, "expected a Linux of 4.19 or later, which counts a connection's bytes"
    return sent


class OneTable(nn.Module):
    """A table and nothing else that trains; under autocast its rows are read in the narrow dtype."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.table(ids), torch.ones(1, self.table.embedding_dim)).square().mean()


@dataclass(frozen=True)
class OneTableWorkload:
    """`num_ids` different ids on rank 0 and fewer on the others, none the padding row, `repeated` of them once more."""

    num_rows: int = 1000
    embedding_dim: int = 100
    num_ids: int = 300
    repeated: int = 50
    padding_idx: int | None = None
    max_norm: float | None = None
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        table = nn.Embedding(
            self.num_rows,
            self.embedding_dim,
            padding_idx=self.padding_idx,
            max_norm=self.max_norm,
            dtype=dtype,
        )
        return OneTable(table)

    def batches(self, step: int, rank: int, seed: int) -> tuple[Tensor, ...]:
        random = torch.Generator().manual_seed(rank)
        different = 1 + torch.randperm(3 * self.num_ids, generator=random)[: self.num_ids - 40 * rank]
        return (torch.cat([different, different[: self.repeated]]),)


@dataclass(frozen=True)
class Sent:
    """What one rank sends per step: measured, and predicted as the mean over ranks."""

    measured_bytes: float
    predicted_bytes: int
    ddp_bytes: int
    table_strategies: tuple[str, ...]


def bytes_per_step(step: Callable[[], object], counter: Counter, flush: Callable[[], None] = lambda: None) -> float:
    """Collective: what this rank sends in one step. `flush` waits for what a step leaves to the next one."""
    for _ in range(WARM_UP_STEPS):
        step()
    flush()
    dist.barrier()  # all earlier messages have arrived, so they are not counted below
    before = counter()
    for _ in range(STEPS):
        step()
    flush()
    dist.barrier()
    return sum(sent - before.get(key, 0) for key, sent in counter().items()) / STEPS


def train_compiled(
    rank: int, world_size: int, workload: Workload, strategy: Strategy, autocast: bool, counter: Counter
) -> Sent:
    """Trains on one batch again and again, for the plan predicts the step of the first one."""
    model = workload.make(torch.float32, seed=0)
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1), strategy=strategy)
    batch = workload.batches(0, rank, 0)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = compiled(*batch)
        loss.backward()
        compiled.optimizer.step()
        compiled.optimizer.zero_grad()

    return Sent(
        bytes_per_step(step, counter, compiled.synchronize),
        compiled.plan.sent_bytes_per_step,
        sum(decision.ddp_bytes_per_step for decision in compiled.plan),
        tuple(decision.strategy for decision in compiled.plan if decision.is_table),
    )


def on_ranks(
    world_size: int, workload: Workload, strategy: Strategy = "alltoall", autocast: bool = False
) -> list[Sent]:
    return run_ranks(world_size, train_compiled, workload, strategy, autocast, sent_by_connection)


def assert_predicted(by_rank: list[Sent]) -> None:
    assert mean(sent.measured_bytes for sent in by_rank) == pytest.approx(by_rank[0].predicted_bytes, rel=TOLERANCE)
