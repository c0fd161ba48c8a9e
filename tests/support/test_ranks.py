"""The shared ranks: results, errors, deaths and hangs of real processes."""

from __future__ import annotations

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import (
    GROUP_TIMEOUT_S,
    RankDied,
    RankError,
    RankTimeout,
    fresh_ranks,
    run_ranks,
    run_ranks_expecting_errors,
)


def _own_pid(rank: int, world_size: int) -> int:
    return os.getpid()


@pytest.fixture
def started() -> None:
    """For tests that measure time: the fork server's and the ranks' start is not part of it."""
    run_ranks(4, _own_pid)


def _pid_and_groups(rank: int, world_size: int) -> tuple[int, int]:
    existing = len(dist.distributed_c10d._world.pg_map)
    dist.new_group(range(world_size))
    return os.getpid(), existing


def test_processes_outlive_a_call_and_groups_do_not() -> None:
    first = run_ranks(2, _pid_and_groups)
    second = run_ranks(2, _pid_and_groups)
    assert first == second
    assert [groups for _, groups in second] == [1, 1]


def _raise_on(rank: int, world_size: int, failing: int) -> int:
    if rank == failing:
        raise KeyError(f"rank {rank} of {world_size} fails")
    return rank


def test_an_exception_is_raised_with_its_rank_and_traceback_and_the_next_call_works() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1.*KeyError: 'rank 1 of 3 fails'.*in _raise_on") as caught:
        run_ranks(3, _raise_on, 1)
    assert [type(error) for error in caught.value.by_rank] == [type(None), KeyError, type(None)]
    assert run_ranks(3, _raise_on, -1) == [0, 1, 2]


def _raise_before_a_collective(rank: int, world_size: int) -> None:
    if rank == 0:
        raise ValueError("before the collective")
    dist.all_reduce(torch.ones(1))


@pytest.mark.usefixtures("started")
def test_peers_of_a_rank_that_raised_end_long_before_the_group_timeout() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)^rank 0, .*ValueError") as caught:
        run_ranks(2, _raise_before_a_collective)
    assert time.monotonic() - start_s < GROUP_TIMEOUT_S / 2
    assert [type(error) for error in caught.value.by_rank] == [ValueError, RuntimeError]


def _warn(rank: int, world_size: int) -> None:
    warnings.warn("mind the rank", UserWarning, stacklevel=1)


def test_warnings_are_errors_on_the_ranks_where_they_are_in_the_test() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (error,) = run_ranks_expecting_errors(1, _warn)
        assert isinstance(error, UserWarning)
        warnings.simplefilter("ignore")
        assert run_ranks(1, _warn) == [None]


def _hang_on(rank: int, world_size: int, hanging: int) -> int:
    while rank == hanging:
        time.sleep(0.1)
    return rank


@pytest.mark.long
@pytest.mark.usefixtures("started")
def test_a_hanging_rank_is_named_and_its_stack_shown() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1, .*still busy after 5 s.* in _hang_on") as caught:
        run_ranks(3, _hang_on, 1, timeout_s=5)
    assert [type(error) for error in caught.value.by_rank] == [type(None), RankTimeout, type(None)]
    assert run_ranks(3, _hang_on, -1) == [0, 1, 2]


def _die(rank: int, world_size: int, dying: int, how: str) -> str:
    dist.all_reduce(torch.ones(1))
    if rank == dying:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(error)
    return "the collective went through"


@pytest.mark.parametrize(("how", "exitcode", "text"), [("kill", -9, "SIGKILL"), ("exit", 7, "exit status 7")])
@pytest.mark.usefixtures("started")
def test_a_rank_that_dies_is_reported_within_seconds(how: str, exitcode: int, text: str) -> None:
    survivor, dead = fresh_ranks(2, _die, 1, how)
    assert survivor.exception is None
    assert "Connection" in str(survivor.result)
    assert survivor.exitcode == 0
    assert isinstance(dead.exception, RankDied)
    assert text in str(dead.exception)
    assert dead.exitcode == dead.exception.exitcode == exitcode
    assert max(survivor.elapsed_s, dead.elapsed_s) < GROUP_TIMEOUT_S / 2


def test_a_death_in_the_shared_pool_is_reported_and_the_next_call_works() -> None:
    with pytest.raises(RankError, match="the process of rank 0 died with SIGKILL"):
        run_ranks(2, _die, 0, "kill")
    assert run_ranks(2, _raise_on, -1) == [0, 1]
