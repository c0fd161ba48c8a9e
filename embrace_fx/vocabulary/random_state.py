"""Restores the state of random number generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def restored_random_state(device: torch.device) -> Iterator[None]:
    """Opens a context that restores the random state of the host and of one device at its end.

    torch's own context handles every GPU of the machine by default, which would create a CUDA context on each.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
