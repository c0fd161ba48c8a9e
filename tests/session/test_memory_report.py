"""What `report()` tells of a table's memory, and that what a table under AdamW sends does not grow with its rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.optim import AdamW

import embrace_fx
from embrace_fx.session.memory_report import tables_report
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from tests.support.inside import session_of
from tests.support.models import TwoTableLMWorkload
from tests.support.ranks import run_ranks
from tests.support.training import SEED

Bytes = tuple[int, int, int | None]


def _trains(rank: int, world_size: int) -> list[tuple[Bytes, Bytes, Bytes, int, str]]:
    """Of the input table: before an optimizer is known, predicted, held; bytes sent; what is printed."""
    found: list[tuple[Bytes, Bytes, Bytes, int, str]] = []
    cases: tuple[tuple[int, RowUpdatesOption], ...] = ((60, "sweep"), (60, "replay"), (6000, "replay"))
    for rows, row_updates in cases:
        workload = replace(TwoTableLMWorkload(), embedding_dim=8)
        plain = replace(workload, num_words=rows).make(torch.float32, SEED)
        model = embrace_fx.compile(plain, strategy="alltoall", row_updates=row_updates)
        optimizer = AdamW(plain.parameters(), amsgrad=True)
        sent, flow = 0, None
        for step in range(5):
            loss = model(*workload.batches(step, rank, SEED))
            if step == 0:
                table = session_of(model).state.tables["embedding.weight"]
                before = table.predicted_bytes(world_size)
            if step == 2:
                flow = session_of(model).programs.flow
                assert flow is not None
                flow.recorder.start()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.synchronize()
        assert flow is not None
        flow.launcher.close()  # all that was submitted has completed, and is told
        recording = flow.recorder.stop()
        sent = sum(int(transfer.sent_bytes) for transfer in recording.transfers if "weight" in transfer.launch.what)
        told = tables_report({"embedding.weight": table}, world_size, {})
        assert tables_report(session_of(model).state.tables, world_size, {}) in model.report()
        found.append((before, table.predicted_bytes(world_size), table.held_bytes(), sent, told))
    return found


@pytest.mark.long
def test_a_table_takes_its_share_and_sends_what_its_batches_read() -> None:
    for by_rank in run_ranks(2, _trains):
        part = 60 * 4 * 4
        (before, swept, held, _, told), (_, rested, _, sent, _), (_, _, large, sent_by_large, _) = by_rank
        assert before == (part, part, None)
        assert swept == (part, part, 3 * part)
        assert rested == (part, 0, 3 * part)
        assert held == (part, 0, 3 * part + 4)  # and a step counter
        assert large == (100 * part, 0, 300 * part + 4)
        assert sent == sent_by_large > 0
        assert told.splitlines()[-1].split() == ["embedding.weight", *["0.00", "MiB"] * 6]
