"""Measures the links between ranks, and caches the result for later runs on the same network."""

from __future__ import annotations

import os
import platform

import torch

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.probe.disk_cache import read_cached, write_cached
from embrace_fx.runtime.probe.probe import loopback, probed_links
from embrace_fx.runtime.ranks.communicator import Communicator

_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def measure_links(communicator: Communicator, sent_bytes: int, device: torch.device) -> Cluster | None:
    """Returns the speed of the links between ranks for each collective, from a cache if possible. Returns None if a
    step sends so little that the speed does not matter. Collective.

    If all ranks are on one host and two short measurements agree with typical links within a host, the typical links
    are returned, so that all runs get the same plan. Otherwise, if a short measurement agrees with the result of an
    earlier run between the same hosts, that result is returned. Otherwise the links are measured. Only rank 0 reads and
    writes the cache.

    Args:
        sent_bytes: approximate bytes that a step sends; equal on all ranks.
        device: the device of the tensors that are sent.
    """
    key: list[tuple[str, ...]] = []
    recalled: list[Cluster | None] = []

    def cached_links() -> tuple[Cluster | None, bool]:
        """Returns (the links that rank 0 has cached, or None; whether all ranks run on one machine)."""
        key.extend(communicator.gather(_machine_key(device), tuple[str, ...]))
        own = read_cached(Cluster, *key) if communicator.rank == 0 else None
        recalled.append(communicator.gather(own, Cluster | None)[0])
        return recalled[0], len({host for host, *_ in key}) == 1

    usual = loopback(communicator.world_size)
    found = probed_links(communicator, sent_bytes, device, cached_links)
    if key and communicator.rank == 0 and found is not None and found not in recalled and found != usual:
        write_cached(found, *key)
    return found


def _machine_key(device: torch.device) -> tuple[str, ...]:
    """Returns properties of this machine that affect its links, for the cache's key."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    interfaces = (os.environ.get(each, "") for each in _INTERFACES)
    return (platform.node(), device.type, name, str(torch.get_num_threads()), *interfaces)
