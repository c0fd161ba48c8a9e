"""An emulated device that takes time: streams have clocks, the host sees nothing early, all else stays as it was."""

from __future__ import annotations

import ctypes
import itertools
import json

import pytest
import torch

from tests.gpu.deeds import Training
from tests.gpu.needs import emulated, ends, gpus
from tests.gpu.timed import SIDE, SLEEP_MS
from tests.support.emulated_cuda import Times
from tests.support.ranks import fresh_ranks

pytestmark = [emulated, pytest.mark.timeout(600)]
TIMES = Times("H100", slow=2.0)


@pytest.fixture(scope="module")
def moments() -> dict[str, list[dict[str, float]]]:
    return json.loads(ends("tests.gpu.timed", 120.0, **TIMES.variables()))


@pytest.mark.parametrize(
    ("moment", "what", "naps"),
    [
        ("one_stream", "device", 2),
        ("one_stream", "host", 2),
        ("one_stream", "enqueued", 0),
        ("two_streams", "other", 1),
        ("two_streams", "device", 1),
        ("waits_for_an_event", "device", 2),
        ("comes_late", "device", 4),
        ("asks", "host", 1),
    ],
)
def test_moments(moment: str, what: str, naps: int, moments: dict[str, list[dict[str, float]]]) -> None:
    shortest_ms = min(found[what] for found in moments[moment])
    assert naps * SLEEP_MS <= shortest_ms < (naps + 0.5) * SLEEP_MS


def test_a_query_says_no_until_the_time_has_come(moments: dict[str, list[dict[str, float]]]) -> None:
    assert not all(found["halfway"] for found in moments["asks"])


def test_a_product_takes_the_data_sheets_time_and_ids_are_computed(moments: dict[str, list[dict[str, float]]]) -> None:
    expected_ms = TIMES.slow * 2 * SIDE**3 / (float(TIMES.variables()["EMULATED_CUDA_TFLOPS"]) * 1e9)
    assert expected_ms < min(found["device"] for found in moments["multiplies"]) < expected_ms + SLEEP_MS / 2
    assert all(found["ids"] for found in moments["multiplies"])


def counts() -> tuple[int, int]:
    """Things enqueued by this process, and bytes that it gave NCCL to send."""
    enqueued, sent = (ctypes.c_long * 4)(), (ctypes.c_long * 2)()
    ctypes.CDLL("libcudart.so.13").emulated_cuda_times(enqueued)
    ctypes.CDLL("libnccl.so.2").emulated_nccl_times(sent)
    return enqueued[0], sent[0]


def launches_with_and_without_times(rank: int, world_size: int) -> list[tuple[int, int]]:
    """What equal steps enqueue and send, before they take time and after."""
    training, found = Training(rank, "cuda"), []
    for step, batch in enumerate(training.batches([0] * 24)):
        if step in {15, 18, 21}:
            torch.cuda.synchronize()
            found.append(counts())
        if step == 18:
            ctypes.CDLL("libcudart.so.13").emulated_cuda_slow_motion(ctypes.c_double(1.0))
        training.model(*batch).backward()
        training.step()
    return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(found)]


@gpus(2)
def test_a_timed_run_launches_and_sends_the_same() -> None:
    for outcome in fresh_ranks(2, launches_with_and_without_times, timeout_s=300.0):
        assert outcome.exception is None, outcome.traceback
        assert outcome.result is not None
        without, with_times = outcome.result
        assert without == with_times
        assert min(without) > 0
