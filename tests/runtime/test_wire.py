"""Bytes on the wire: equal to the plan's prediction, and DDP's equal to what it says.

Every rank reads the kernel's count of payload bytes of its own TCP connections, which other programs' traffic does not
reach.

gloo frames every message with 144 bytes: a 48-byte preamble before the data and one each for "ready to send" and "ready
to receive" (gloo/transport/tcp/pair.cc). A step sends 32 bytes to each peer that are no parameter's: the head of its
announcement, and the flags of its backward. Payloads are large enough here for both to stay well below the tolerance.
"""

from __future__ import annotations

from statistics import mean

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.support.heads import HeadWorkload
from tests.support.models import TwoTableLMWorkload, Workload
from tests.support.ranks import run_ranks
from tests.support.wire import (
    TOLERANCE,
    OneTableWorkload,
    assert_predicted,
    bytes_per_step,
    on_ranks,
    sent_by_connection,
)


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_of_an_output_layer_equal_the_prediction(world_size: int, tied: bool) -> None:
    workload = HeadWorkload(tied=tied, bias=True, num_words=3000, width=256, length=60, ignored=0)
    strategy = {"words.weight": "alltoall", workload.table: "vocabulary"}

    by_rank = on_ranks(world_size, workload, strategy)

    assert by_rank[0].table_strategies == (("vocabulary",) if tied else ("alltoall",))
    assert_predicted(by_rank)
    assert by_rank[0].predicted_bytes < by_rank[0].ddp_bytes / 2


@pytest.mark.parametrize(
    ("world_size", "workload", "autocast"),
    [
        pytest.param(3, OneTableWorkload(padding_idx=0), False, id="uneven columns", marks=pytest.mark.long),
        pytest.param(2, OneTableWorkload(), True, id="rows_in_bfloat16"),
        pytest.param(2, TwoTableLMWorkload(2000, 64, 48, 16, 20, 100), False, id="two tables", marks=pytest.mark.long),
    ],
)
def test_bytes_equal_the_prediction(world_size: int, workload: Workload, autocast: bool) -> None:
    by_rank = on_ranks(world_size, workload, autocast=autocast)
    assert set(by_rank[0].table_strategies) == {"alltoall"}
    assert_predicted(by_rank)


@pytest.mark.long
def test_bytes_that_keep_replicas_equal_are_predicted() -> None:
    by_rank = on_ranks(2, OneTableWorkload(4000, embedding_dim=5, num_ids=1000, max_norm=1.0))
    assert by_rank[0].table_strategies == ("allreduce",)
    assert by_rank[0].predicted_bytes > 1.05 * by_rank[0].ddp_bytes
    assert_predicted(by_rank)


def _train_ddp(rank: int, world_size: int, workload: Workload) -> float:
    model = DistributedDataParallel(workload.make(torch.float32, seed=0))
    optimizer = SGD(model.parameters(), 0.1)
    batch = workload.batches(0, rank, 0)

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return bytes_per_step(step, sent_by_connection)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_sends_what_the_plan_says_of_it(world_size: int) -> None:
    workload = TwoTableLMWorkload(2000, 64, 48, 16, 20, 100)
    predicted = on_ranks(world_size, workload, strategy="allreduce")[0].ddp_bytes
    assert mean(run_ranks(world_size, _train_ddp, workload)) == pytest.approx(predicted, rel=TOLERANCE)
