"""Measures the share of a rank's processors that a transfer takes from compute."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Load:
    """One rank's processors, and the time that a transfer took from them.

    Attributes:
        host: the name of its machine.
        cores: the cores that it may run on.
        threads: the number of its compute threads.
        took_ms: processor time of all of its threads during `wall_ms` of transfers.
    """

    host: str
    cores: tuple[int, ...]
    threads: int
    took_ms: float
    wall_ms: float

    @classmethod
    def of(cls, took_ms: float, wall_ms: float) -> Load:
        """Returns this rank's load."""
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        return cls(platform.node(), tuple(sorted(cores)), torch.get_num_threads(), took_ms, wall_ms)


def taken_share(everyone: Sequence[Load]) -> float:
    """Computes the share of a transfer's time by which it delays compute beside it, on the host where it is largest.

    Cores that no rank computes on take transfers without delay; the rest of their work is shared by all of a host's.

    >>> two = Load("a", (0, 1), 1, took_ms=50.0, wall_ms=100.0)
    >>> taken_share([two, two]), taken_share([two])
    (0.5, 0.0)
    """
    hosts: dict[str, list[Load]] = defaultdict(list)
    for each in everyone:
        hosts[each.host].append(each)
    shares = []
    for ranks in hosts.values():
        cores = len({core for each in ranks for core in each.cores})
        idle = max(cores - sum(each.threads for each in ranks), 0)
        took = sum(each.took_ms / each.wall_ms for each in ranks)
        shares.append(min(max(took - idle, 0.0) / cores, 1.0))
    return max(shares)
