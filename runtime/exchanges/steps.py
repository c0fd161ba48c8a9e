"""Exchanges as generators, and how to run them.

Contract
    An exchange yields each collective once it is launched, and is resumed with its value once that is there; what it
    returns is its result. It may launch the next collective before it yields the first. How many it yields, and which
    collectives it launches, is the same on all ranks whatever the data, or ranks would wait for different things.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from torch import Tensor

from embrace_fx.runtime.ranks.communicator import InFlight

T = TypeVar("T")

Steps = Generator[InFlight, Tensor, T]
"""A communication in several rounds with a result."""


def run(steps: Steps[T]) -> T:
    """Runs an exchange to its end, and returns its result; nothing else happens meanwhile."""
    try:
        launch = next(steps)
        while True:
            if launch.work is not None:
                launch.work.wait()
            launch = steps.send(launch.value)
    except StopIteration as end:
        result: T = end.value
        return result
