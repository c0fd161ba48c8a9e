"""The state of random numbers around code that draws some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """A context that leaves the random numbers of the host, and of one device, as it finds them.

    torch's own takes every GPU of the machine, unless it is told: each process would have a context on all of them.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
