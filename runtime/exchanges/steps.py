"""Runs exchanges, which are generators.

Contract
    An exchange yields each collective after launching it, and is resumed with its value. It may launch the next
    collective before it yields the first. The collectives and their number are the same on all ranks whatever the
    data, or ranks would wait for different ones.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from torch import Tensor

from embrace_fx.runtime.ranks.communicator import InFlight

T = TypeVar("T")

Steps = Generator[InFlight, Tensor, T]
"""A communication in several rounds, with a result."""


def run(steps: Steps[T]) -> T:
    """Runs an exchange to its end, and returns its result."""
    try:
        launch = next(steps)
        while True:
            if launch.work is not None:
                launch.work.wait()
            launch = steps.send(launch.value)
    except StopIteration as end:
        result: T = end.value
        return result
