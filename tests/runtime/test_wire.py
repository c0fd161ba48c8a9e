"""Bytes on the wire: independent of the table's rows, equal to the plan's prediction, and DDP's equal to what it says.

Every rank reads the kernel's count of payload bytes of its own TCP connections, which other programs' traffic does not
reach. The `long` test counts whole packets on interfaces, with every rank on a host of its own.

gloo frames every message with 144 bytes: a 48-byte preamble before the data and one each for "ready to send" and "ready
to receive" (gloo/transport/tcp/pair.cc). A step sends 32 bytes to each peer that are no parameter's: the head of its
announcement, and the flags of its backward. Payloads are large enough here for both to stay well below the tolerance.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from benchmarks.namespaces import interface_sent_bytes, obstacle
from benchmarks.network import Links, network
from tests.support.heads import HeadWorkload
from tests.support.models import TwoTableLMWorkload, Workload
from tests.support.ranks import run_ranks
from tests.support.wire import (
    TOLERANCE,
    OneTableWorkload,
    Sent,
    assert_predicted,
    bytes_per_step,
    on_ranks,
    sent_by_connection,
    train_compiled,
)


def sent_by_interface() -> dict[int, int]:
    """Bytes of packets that this host has sent."""
    return {0: interface_sent_bytes(os.environ["GLOO_SOCKET_IFNAME"])}


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_of_a_sharded_table_do_not_depend_on_its_rows(world_size: int) -> None:
    small = OneTableWorkload(num_rows=1000)
    large = replace(small, num_rows=10 * small.num_rows)
    sent_small, sent_large = on_ranks(world_size, small), on_ranks(world_size, large)
    assert sent_small[0].table_strategies == sent_large[0].table_strategies == ("alltoall",)
    for rank in range(world_size):
        assert sent_large[rank].measured_bytes == pytest.approx(sent_small[rank].measured_bytes, rel=1e-3)
    assert sent_large[0].predicted_bytes == sent_small[0].predicted_bytes
    assert_predicted(sent_small)
    assert_predicted(sent_large)
    assert sent_large[0].ddp_bytes == 10 * sent_small[0].ddp_bytes


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_bytes_of_an_output_layer_equal_the_prediction(world_size: int, tied: bool) -> None:
    workload = HeadWorkload(tied=tied, bias=True, num_words=3000, width=256, length=60, ignored=0)
    strategy = {"words.weight": "alltoall", workload.table: "vocabulary"}

    by_rank = on_ranks(world_size, workload, strategy)

    assert by_rank[0].table_strategies == (("vocabulary",) if tied else ("alltoall",))
    assert_predicted(by_rank)
    assert by_rank[0].predicted_bytes < by_rank[0].ddp_bytes / 2


@pytest.mark.long
def test_repeated_ids_travel_once() -> None:
    few, many = on_ranks(2, OneTableWorkload(repeated=0)), on_ranks(2, OneTableWorkload(repeated=200))
    for rank in range(2):
        assert many[rank].measured_bytes == pytest.approx(few[rank].measured_bytes, rel=1e-3)


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
def test_rows_in_bfloat16_are_half_the_bytes() -> None:
    (wide, _), (narrow, _) = on_ranks(2, OneTableWorkload()), on_ranks(2, OneTableWorkload(), autocast=True)
    assert narrow.measured_bytes == pytest.approx(wide.measured_bytes / 2, rel=TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(OneTableWorkload(embedding_dim=20, scale_grad_by_freq=True), id="counts_of_scale_grad_by_freq"),
        pytest.param(OneTableWorkload(4000, embedding_dim=5, num_ids=1000, max_norm=1.0), id="ids_of_max_norm"),
    ],
)
def test_bytes_that_keep_replicas_equal_are_predicted(workload: Workload) -> None:
    by_rank = on_ranks(2, workload)
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


def report_from_host() -> None:
    """What a rank of the test below runs: prints what its interface sends for 1000 and for 10,000 rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = [
        train_compiled(
            dist.get_rank(),
            dist.get_world_size(),
            OneTableWorkload(num_rows, embedding_dim=400),
            "alltoall",
            autocast=False,
            counter=sent_by_interface,
        )
        for num_rows in (1000, 10_000)
    ]
    print(json.dumps([asdict(sent) for sent in results]))
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
@pytest.mark.parametrize("world_size", [2, 4])
def test_interfaces_count_what_the_plan_predicts(world_size: int) -> None:
    command = [sys.executable, "-c", "from tests.runtime.test_wire import report_from_host; report_from_host()"]
    root = str(Path(__file__).parents[2])
    with network(Links(world_size, rate_mbit=200)) as hosts:
        assert hosts.reached.shaped, hosts.reached.reason
        printed = hosts.run(command, timeout_s=100, environment={"PYTHONPATH": root})
    small, large = ([Sent(**sent) for sent in each] for each in zip(*map(json.loads, printed), strict=True))
    assert_predicted(small)
    assert_predicted(large)
    for few, many in zip(small, large, strict=True):
        assert many.measured_bytes == pytest.approx(few.measured_bytes, rel=0.02)
