"""The emulated device finds what would go wrong on a real one: each mistake is made once, and is named."""

from __future__ import annotations

import ctypes
import json

import pytest

from tests.gpu.needs import emulated, ends, gpus, trains_on_gpu
from tests.support.models import MODELS
from tests.support.ranks import fresh_ranks

pytestmark = [emulated, pytest.mark.timeout(600)]


def contexts() -> int:
    return ctypes.CDLL("libcudart.so.13").emulated_cuda_contexts()


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Returns the recorded errors for each way in which the launcher was broken."""
    own = {"EMULATED_CUDA_POISON": "1", "EMULATED_CUDA_FINDINGS": str(tmp_path_factory.mktemp("broken") / "broken")}
    return json.loads(ends("tests.gpu.broken", 300.0, **own))


@pytest.mark.parametrize("way", ["sound", "copies_from_new_buffers"])
def test_nothing_is_found_where_nothing_is_wrong(way: str, broken: dict[str, list[str]]) -> None:
    assert broken[way] == []


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("no_stream_waits", "nothing orders the two"),
        ("no_record_stream", "whoever has the memory next"),
        ("what_is_sent_is_freed_at_once", "whoever has the memory next"),
        ("the_event_of_a_launch_is_recorded_before_it", "nothing orders the two"),
        ("copies_from_one_buffer", "PINNED"),
    ],
)
def test_a_broken_launcher_is_found(way: str, says: str, broken: dict[str, list[str]]) -> None:
    assert any(says in finding for finding in broken[way]), broken[way]


def trains_and_counts(rank: int, world_size: int) -> tuple[int, int]:
    trains_on_gpu(rank, world_size, dict(MODELS)["two_table_lm"], "2d", "nccl", 2, strict_from=13)
    made = (ctypes.c_long * 2)()
    ctypes.CDLL("libnccl.so.2").emulated_nccl_counts(made)
    return contexts(), made[0]


@gpus(2)
def test_a_rank_uses_its_own_device_three_communicators_and_two_waits_a_step() -> None:
    for rank, outcome in enumerate(fresh_ranks(2, trains_and_counts, timeout_s=400.0)):
        assert outcome.result is not None, outcome.traceback
        used, communicators = outcome.result
        assert used == 1 << rank
        assert communicators <= 3
