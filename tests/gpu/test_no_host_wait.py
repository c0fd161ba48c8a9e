"""Nothing in a steady step makes the host wait for the device, by torch's own account of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from embrace_fx.runtime.flow.routing import Routing, SplitAhead, membership, route_padded
from embrace_fx.runtime.kernels import padded_unique_ids
from embrace_fx.runtime.launch.streams import choose_streams
from embrace_fx.runtime.lower.rnn_loop import TimeOrder
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.backward_flags import launch_flags
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.gpu.needs import gpus, set_sync_debug_mode, trains_on_gpu
from tests.support.models import MODELS
from tests.support.ranks import run_ranks

STEADY = 13
"""From here on no step is profiled, and none is the first of its kind."""


@pytest.fixture
def _strict() -> Iterator[None]:
    set_sync_debug_mode("error")
    yield
    set_sync_debug_mode("default")


@gpus(1)
@pytest.mark.usefixtures("_strict")
def test_the_next_batch_is_prepared_without_the_host() -> None:
    device = torch.device("cuda", 0)
    streams = choose_streams(device)
    assert streams is not None
    there = streams.record("batch ready")
    with streams.on("ids", "unique rows"):
        streams.wait(there)
        ids = torch.arange(40, device=device) % 7
        unique, count, _ = padded_unique_ids([ids], 9, 0)
        packed = torch.cat([count.view(1), unique]).view(1, -1)
        table = route_padded(packed, [[unique.numel()]], 0, 9)
        current = Routing(torch.arange(5, device=device), (5,), Grid(1, 1), 0)
        split = SplitAhead(current, table, membership(9, device), 9, 3, (0,))
        copy, done = streams.to_host(torch.cat([table.counts, split.sizes])), streams.record("sizes copied")

    assert streams.read(done, copy)[0] == 7


@gpus(1)
@pytest.mark.usefixtures("_strict")
def test_sequences_are_turned_without_the_host() -> None:
    walk, device = TimeOrder([2, 1], reverse=True), torch.device("cuda", 0)
    found = [walk.reversal(device), *walk.ends(device)]
    set_sync_debug_mode("default")
    assert [each.tolist() for each in found] == [[2, 1, 0], [2, 1], [0, 1]]


@gpus(1)
@pytest.mark.usefixtures("_strict")
def test_the_loss_is_checked_without_a_synchronisation() -> None:
    losses = [torch.full((), value, device="cuda:0") for value in (1.0, float("nan"))]
    with pytest.raises(FloatingPointError, match=r"rank\(s\) 0"):
        launch_flags(losses, [1], 0, Communicator(None))("", None, lambda: False)


@gpus(1)
@pytest.mark.parametrize("model", ["two_table_lm", "bag_recommender"])
def test_steady_steps_of_a_single_process(model: str) -> None:
    run_ranks(1, trains_on_gpu, dict(MODELS)[model], "2d", "gloo", 1, STEADY, timeout_s=100.0)


@gpus(2)
@pytest.mark.parametrize("schedule", ["vertical", "2d"])
def test_steady_steps_over_nccl(schedule: ScheduleName) -> None:
    run_ranks(2, trains_on_gpu, dict(MODELS)["two_table_lm"], schedule, "nccl", 2, STEADY, timeout_s=240.0)
