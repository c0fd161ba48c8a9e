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
    """How busy a rank's processors were during a series of collectives.

    Attributes:
        host: the name of the rank's machine.
        cores: the numbers of the cores on which the rank may run.
        threads: the number of threads that compute the model.
        took_ms: processor time of all threads of the process during the series.
        wall_ms: duration of the series.
    """

    host: str
    cores: tuple[int, ...]
    threads: int
    took_ms: float
    wall_ms: float

    @classmethod
    def of_this_rank(cls, took_ms: float, wall_ms: float) -> Load:
        """Returns the load of this rank.

        Args:
            took_ms, wall_ms: the measured times, as in `Load`.
        """
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return cls(platform.node(), cores, torch.get_num_threads(), took_ms, wall_ms)


def delay_share(loads: Sequence[Load]) -> float:
    """Returns the share of a collective's duration, from 0 to 1, by which the collective delays concurrent compute on
    the same host. If the share differs between hosts, returns the largest one.

    Cores on which no rank computes do a collective's work without delay. The rest of the work is spread over all cores.

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
