"""Restores the state of random numbers after code that draws some."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Opens a context that restores the random state of the host, and of one device, at its end.

    torch's own uses every GPU of the machine by default: each process would open a CUDA context on all of them.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
