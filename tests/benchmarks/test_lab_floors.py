"""Floors: bytes counted by hand for two ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from benchmarks.lab.floors import (
    all_gather_bytes,
    all_to_all_bytes,
    dependences_ms,
    floor,
    ideal,
    ring_bytes,
    step_graph,
    unique_rows,
)
from benchmarks.models.base import Batch, Lookups, TableModel
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph

WIDTH, ROWS = 4, 1000


class OneTable(TableModel):
    """One table read twice, and eight dense parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"words": nn.Embedding(ROWS, WIDTH)})
        self.dense = nn.Linear(WIDTH, 2, bias=False)

    def lookups(self, *batch: Tensor) -> Lookups:
        return {"left": ("words", batch[0]), "right": ("words", batch[1])}

    def loss(self, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        total: Tensor = self.dense(torch.cat([*rows.values()])).sum()
        return total


@dataclass(frozen=True)
class OneTableWorkload:
    def make(self) -> OneTable:
        return OneTable()

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        """Rank 0 reads the rows 5 and 6, rank 1 the rows 5, 7 and 8."""
        return (
            (torch.tensor([5, 6, 5]), torch.tensor([6]))
            if rank == 0
            else (torch.tensor([5, 5]), torch.tensor([[7, 8]]))
        )


def test_a_row_that_two_lookups_read_counts_once() -> None:
    workload = OneTableWorkload()

    assert unique_rows(workload.make().lookups(*workload.batch(0, 0, 0))) == {"words": 2}
    assert unique_rows(workload.make().lookups(*workload.batch(0, 1, 0))) == {"words": 3}


def test_the_cheapest_exchange_of_two_ranks() -> None:
    # AlltoAll, half a row being 8 bytes: rank 0 sends 3 half rows forward, 2 back and 2 ids; rank 1 2, 3 and 3 ids.
    assert all_to_all_bytes([2, 3], WIDTH) == max(3 * 8 + 2 * 8 + 2 * 8, 2 * 8 + 3 * 8 + 3 * 8) == 64
    # AllGather: rank 1 sends 3 rows of 16 bytes and their ids.
    assert all_gather_bytes([2, 3], WIDTH) == 3 * (16 + 8) == 72
    assert ring_bytes(100, 2) == 100
    assert ring_bytes(100, 4) == 150

    found = floor(OneTableWorkload(), 2, range(1, 3), seed=0)

    assert found.exchanges == {"words": "AlltoAll"}
    assert found.dense_bytes == 8 * 4
    assert found.bytes_per_rank == 64 + 32
    assert found.time_ms(rate_mbit=96 * 8 / 1e6) == pytest.approx(1000)


def test_dependences_of_blocks_that_wait_for_their_own_gradients() -> None:
    """backward b (2 ms) -> backward a (1 ms) -> forward a (1 ms) -> forward b (2 ms); each AllReduce takes 5 ms."""
    compute = [
        Operation("backward b", "backward", "compute", 2.0),
        Operation("backward a", "backward", "compute", 1.0),
        Operation("forward a", "forward", "compute", 1.0),
        Operation("forward b", "forward", "compute", 2.0),
    ]
    reduces = [Operation(f"reduce {block}", "all_reduce", "dense", 5.0) for block in "ab"]
    dependences = [Dependence(f"backward {block}", f"reduce {block}") for block in "ab"]
    waits = [Dependence(f"reduce {block}", f"forward {block}") for block in "ab"]
    order = tuple(operation.name for operation in compute)

    # a is the last of the backward and the first of the forward: 3 + 5 + 3; b's 2 + 5 + 2 is under it.
    assert dependences_ms(StepGraph((*compute, *reduces), (*dependences, *waits), order)) == 11.0
    # Without a's, b's AllReduce is awaited after forward a: 2 + 5 + 2, 1 of them under backward a and forward a.
    assert dependences_ms(StepGraph((*compute, reduces[1]), (dependences[1], waits[1]), order)) == 9.0


def test_an_ideal_step_computes_as_if_alone_and_sends_at_the_bare_rate() -> None:
    steps = StepGraph(
        (
            Operation("backward", "backward", "compute", 30.0),
            Operation("forward", "forward", "compute", 10.0),
            Operation("reduce", "all_reduce", "dense", 99.0, sent_bytes=1_000_000, serves=("a",)),
        ),
        (Dependence("backward", "reduce"), Dependence("reduce", "forward")),
        ("backward", "forward"),
    )

    found = ideal(step_graph(json.loads(json.dumps(asdict(steps)))), compute_ms=20.0, rate_mbit=200.0)

    assert [operation.duration_ms for operation in found.operations] == [15.0, 5.0, 40.0]
    assert dependences_ms(found) == 60.0
    assert replace(found, operations=steps.operations) == steps
