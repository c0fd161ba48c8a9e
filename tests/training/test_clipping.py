"""Clipping by norm, as every script has it: what it sends, and that rows sent ahead are still used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import embrace_fx
from embrace_fx.runtime.flow.comm_pipeline import CommPipeline
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from tests.support.models import TwoTableLMWorkload
from tests.support.ranks import run_ranks
from tests.support.training import SEED, tables, whole

DTYPE = torch.float64
WORKLOAD = TwoTableLMWorkload()
STEPS, SETTLED = 8, 3
"""Steps, and those after which batches are looked ahead to and the optimizer is known."""


def _train(rank: int, model: Any, kind: Any, *, write: bool) -> tuple[list[float], dict[str, Tensor], dict[str, int]]:
    optimizer = kind(model.parameters(), lr=0.02, weight_decay=0.1)
    batches = [WORKLOAD.batches(step, rank, SEED) for step in range(STEPS)]
    log, counts = [], {"reductions": 0, "rows forgotten": 0}

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for step, batch in enumerate(model.lookahead(batches) if hasattr(model, "lookahead") else batches):
            if step == SETTLED:
                patch.setattr(Communicator, "reduce_scalar", counted("reductions", Communicator.reduce_scalar))
                patch.setattr(CommPipeline, "_forget_rows", counted("rows forgotten", CommPipeline._forget_rows))
            model(*batch).backward()
            log.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
            if write and step == SETTLED + 1:
                for table in tables(model.module).values():
                    table.data.mul_(0.5)
    ends = whole(model.state_dict().items())
    return log, {name.removeprefix("module."): value for name, value in ends.items()}, counts


def _compare(rank: int, world_size: int) -> list[Any]:
    found = []
    cases: tuple[tuple[Any, RowUpdatesOption], ...] = ((AdamW, "sweep"), (AdamW, "replay"), (SGD, "sweep"))
    for kind, row_updates in cases:
        for write in (False, True):
            plain = WORKLOAD.make(DTYPE, SEED)
            compiled = embrace_fx.compile(plain, strategy="alltoall", row_updates=row_updates)
            ours = _train(rank, compiled, kind, write=write)
            theirs = _train(rank, DistributedDataParallel(WORKLOAD.make(DTYPE, SEED)), kind, write=write)
            found.append(((kind.__name__, row_updates, write), ours, theirs))
    return found


@pytest.mark.long
def test_norms_take_one_reduction_and_rows_sent_ahead_are_used_unless_a_table_was_written() -> None:
    for by_rank in zip(*run_ranks(2, _compare), strict=True):
        for case, (log, ends, counts), (expected_log, expected, _) in by_rank:
            assert log == pytest.approx(expected_log, rel=1e-9), case
            for name, value in expected.items():
                torch.testing.assert_close(ends[name], value, rtol=1e-9, atol=1e-11, msg=f"{case}, {name}")
            assert counts["reductions"] == STEPS - SETTLED, case
            assert counts["rows forgotten"] == case[-1], case
