"""Ranks that wait for each other in different process groups say so at once; those that are late are waited for."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import nn

import embrace_fx
from embrace_fx.runtime.ranks.group_deadlock import OtherGroup, check_group_deadlock
from tests.support.inside import session_of
from tests.support.ranks import run_ranks, run_ranks_expecting_errors, store


def _model() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 1))


def _ranks_of(model: embrace_fx.CompiledModel) -> int:
    return session_of(model).communicator.world_size


def _in_two_groups(rank: int, world_size: int, late_s: float) -> None:
    other = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=60))
    if rank == 1:
        time.sleep(late_s)
    began_s = time.monotonic()
    with pytest.raises(OtherGroup) as caught:
        embrace_fx.compile(_model(), process_group=other if rank == 1 else None)
    assert time.monotonic() - began_s < 30
    assert isinstance(caught.value, ValueError)
    dist.barrier()  # otherwise this rank's next compile() would meet the other's first
    assert _ranks_of(embrace_fx.compile(_model())) == world_size  # after the mistake is corrected, training is possible
    raise caught.value


def test_ranks_in_different_groups_are_told_both_groups() -> None:
    for rank, error in enumerate(run_ranks_expecting_errors(2, _in_two_groups, 0.0)):
        assert "of ranks 0, 1 on rank 0" in str(error)
        assert "of ranks 0, 1 on rank 1" in str(error)
        assert isinstance(error, OtherGroup), rank


def _one_after_the_other(rank: int, world_size: int) -> tuple[int, ...]:
    """Rank 1 comes to the pair of 0 and 1 only once it has been in that of all, and rank 2 is late there."""
    pair = dist.new_group([0, 1])
    if rank == 2:
        time.sleep(0.7)  # longer than the first check for a deadlock
    first = _ranks_of(embrace_fx.compile(_model()))
    return (first, _ranks_of(embrace_fx.compile(_model(), process_group=pair))) if rank < 2 else (first,)


def test_who_is_late_is_waited_for() -> None:
    assert run_ranks(3, _one_after_the_other) == [(3, 2), (3, 2), (3,)]


def _waits_elsewhere_first(rank: int, world_size: int) -> tuple[int, ...]:
    """Rank 0 waits for 1, who waits for 2 in another group, which is late: nobody waits for each other."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    if rank == 2:
        time.sleep(0.7)  # longer than the first check for a deadlock
    met_in = []
    for pair in reversed(pairs):
        if rank in dist.get_process_group_ranks(pair):
            with check_group_deadlock(store(), pair):
                dist.barrier(pair)
            met_in.append(dist.get_world_size(pair))
    return tuple(met_in)


def test_who_waits_elsewhere_for_a_third_is_waited_for() -> None:
    assert run_ranks(3, _waits_elsewhere_first) == [(2,), (2, 2), (2,)]


def _in_more_groups(rank: int, world_size: int) -> None:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    if rank < 2:
        embrace_fx.compile(_model(), process_group=pairs[0])


def test_ranks_in_different_numbers_of_groups_cannot_make_one_more() -> None:
    """Torch would have each wait for a group that the other knows by another name."""
    for error in run_ranks_expecting_errors(3, _in_more_groups)[:2]:
        assert "torch derives the name of a new group from this number" in str(error)
