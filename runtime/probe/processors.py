"""Measures how much transfers slow down compute on the same processors."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Load:
    """How busy one rank's processors were during transfers.

    Attributes:
        host: the name of the rank's machine.
        cores: the cores on which the rank may run.
        threads: the number of its compute threads.
        took_ms: the processor time of all of its threads during `wall_ms` of transfers.
    """

    host: str
    cores: tuple[int, ...]
    threads: int
    took_ms: float
    wall_ms: float

    @classmethod
    def of_this_rank(cls, took_ms: float, wall_ms: float) -> Load:
        """Returns the load of this rank, given the measured times. The arguments are fields of the load."""
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return cls(platform.node(), tuple(sorted(cores)), torch.get_num_threads(), took_ms, wall_ms)


def delay_share(loads: Sequence[Load]) -> float:
    """Returns the share of a transfer's time by which it delays compute on the same host, for the host with the largest
    share.

    Cores that no rank computes on take transfers without delay; the rest of their work is shared by all of a host's.

    >>> two = Load("a", (0, 1), 1, took_ms=50.0, wall_ms=100.0)
    >>> delay_share([two, two]), delay_share([two])
    (0.5, 0.0)
    """
    hosts: dict[str, list[Load]] = defaultdict(list)
    for each in loads:
        hosts[each.host].append(each)
    shares = []
    for ranks in hosts.values():
        cores = len({core for each in ranks for core in each.cores})
        idle = max(cores - sum(each.threads for each in ranks), 0)
        took = sum(each.took_ms / each.wall_ms for each in ranks)
        shares.append(min(max(took - idle, 0.0) / cores, 1.0))
    return max(shares)
