"""Rows beyond memory in schedules and timelines: reads and writes are a lane beside compute."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import profile

import embrace_fx
from embrace_fx.runtime.tiers.tiered_table import TieredTable
from tests.support.inside import session_of
from tests.support.ranks import run_ranks
from tests.support.tiers import OPTIMIZERS, OneTable, batches

ROWS = 20_000


def recorded(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = OneTable()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    compiled = embrace_fx.compile(
        model, optimizer=optimizer, strategy="alltoall", table_memory=0.4, spill_to=tempfile.gettempdir()
    )

    def train(steps: int) -> None:
        for batch in compiled.lookahead(batches(rank, steps, zipf=False), 3):
            compiled(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(4)
    with compiled.record(), profile() as profiled:
        train(12)
    spans = {each.key for each in profiled.key_averages()}
    assert {f"embrace_fx: submit {kind} table.weight" for kind in ("read", "write")} <= spans
    for shown in (compiled.timeline, compiled.schedule.predicted):
        moved = {(span.rank, span.operation.kind) for span in shown.spans if span.operation.lane == "storage"}
        assert moved == {(each, kind) for each in {span.rank for span in shown.spans} for kind in ("read", "write")}
    for wait in compiled.timeline.waits:  # none is longer than what it waits for, with what stands before that
        assert wait.lane != "storage" or any(
            span.operation.lane == "storage" and span.rank == wait.rank and span.end_ms <= wait.end_ms
            for span in compiled.timeline.spans
        )
    assert compiled.metrics()["wait_storage_ms"] >= 0.0
    compiled.timeline.save(path := Path(tempfile.mkdtemp()) / "timeline.json")
    assert '"name": "storage"' in path.read_text()
    told = r"[1-9][0-9.]+% in memory; .* from file;\n *least budget .*% of its rows\); to hide reads behind .*% of its"
    assert re.search(told, compiled.report())


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_reads_and_writes_are_a_lane_of_schedule_and_timeline(world_size: int) -> None:
    run_ranks(world_size, recorded)


def moved(rank: int, world_size: int) -> tuple[float, float]:
    """Rows that a step reads, measured and predicted, by ids of Zipf's law."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(ROWS, 4, mode="sum")
    optimizer = torch.optim.AdamW(table.parameters(), lr=0.01)
    compiled = embrace_fx.compile(
        table, optimizer=optimizer, strategy="alltoall", table_memory=0.25, spill_to=tempfile.gettempdir()
    )
    random, counts = torch.Generator().manual_seed(rank), []
    ids = ((ROWS ** torch.rand(64, 8, generator=random) - 1).long() for _ in range(160))
    for step, batch in enumerate(compiled.lookahead(ids, 3)):
        compiled(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (100, 150):
            kept = session_of(compiled).state.tables["weight"]
            assert isinstance(kept, TieredTable)
            counts.append(kept.memory.counts.read)
    return (counts[1] - counts[0]) / 50, compiled.plan.memory["weight"].moved_rows


@pytest.mark.long
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_that_a_step_reads_are_as_predicted(world_size: int) -> None:
    for measured, predicted in run_ranks(world_size, moved):
        assert measured == pytest.approx(predicted, rel=0.15)
