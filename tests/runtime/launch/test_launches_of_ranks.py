"""The launcher on ranks: each launches a class in the same order, and none stands still for a rank that reads alone."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from embrace_fx.runtime.launch import launch_queue
from embrace_fx.runtime.launch.launch_queue import Ticket
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.vocabulary.operation_id import OperationId
from tests.support.launches import ORDER, make, stand_still
from tests.support.ranks import run_ranks


def submits_in_its_own_order(rank: int, world_size: int, stands_still: bool) -> dict[str, list[str]]:
    """Windows of sums. A rank whose launches of a class came in another order would add up other things."""
    communicator = Communicator(dist.group.WORLD)
    communicator.open_lanes()
    launch_queue.STANDSTILL_S, before = 0.1 if stands_still else 1e6, launch_queue.STANDSTILL_S
    by_class: dict[str, list[str]] = {launch.lane: [] for launch in ORDER}
    shared, own = random.Random(0), random.Random(rank)
    launcher = make()

    def sums(each: OperationId, window: int) -> Callable[[], InFlight]:
        def launch() -> InFlight:
            by_class[each.lane].append(f"{each} {window}")
            return communicator.all_reduce_(torch.tensor([term(each, window)]), "sum", LANE_GROUP[each.lane])

        return launch

    submissions: list[tuple[Ticket, int]] = []
    for window in range(12):
        submitted = [each for each in ORDER if shared.random() < 0.7]
        hurries = shared.random() < 0.2
        own.shuffle(submitted)
        for each in submitted:
            if stands_still and own.random() < 0.3:
                stand_still(launcher)
            ticket = launcher.submit(each, sums(each, window), 0)
            submissions.append((ticket, world_size * term(each, window)))
        launcher.open_window()
        if hurries:
            with launcher.flushing():
                for ticket, _ in submissions:
                    ticket.wait()
    for ticket, expected in submissions:
        assert ticket.wait().item() == expected
    launch_queue.STANDSTILL_S = before
    return by_class


def term(launch: OperationId, window: int) -> int:
    """Returns a different number for each launch of each window."""
    return 100 * window + ORDER.index(launch)


@pytest.mark.parametrize("stands_still", [False, True], ids=["in order", "overtaking"])
def test_ranks_launch_each_class_in_the_same_order(stands_still: bool) -> None:
    first, *others = run_ranks(3, submits_in_its_own_order, stands_still)
    assert all(other == first for other in others)
    assert min(map(len, first.values())) > 5
