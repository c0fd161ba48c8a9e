"""Exchanges as generators, and how to run them.

Contract
    An exchange yields each collective once it is launched, and is resumed with its value once that is there; what it
    returns is its result. It may launch the next collective before it yields the first. How many it yields, and which
    collectives it launches, is the same on all ranks whatever the data, or ranks would wait for different things.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

from torch import Tensor

from embrace_fx.runtime.ranks.communicator import InFlight

T = TypeVar("T")

Steps = Generator[InFlight, Tensor, T]
"""A communication in several rounds with a result."""


def run(steps: Steps[T]) -> T:
    """Runs one to its end; nothing else happens meanwhile."""
    return run_all([steps])[0]


def run_all(exchanges: Sequence[Steps[T]]) -> list[T]:
    """Runs several to their ends, one round of each in turn, so that each has a collective in flight.

    All ranks give the same exchanges in the same order.

    Returns: their results, in the order given.
    """
    results: dict[int, T] = {}
    in_flight: dict[int, InFlight | None] = dict.fromkeys(range(len(exchanges)))
    while in_flight:
        for index, launch in list(in_flight.items()):
            try:
                in_flight[index] = _resume(exchanges[index], launch)
            except StopIteration as end:
                results[index] = end.value
                del in_flight[index]
    return [results[index] for index in range(len(exchanges))]


def _resume(steps: Steps[T], launch: InFlight | None) -> InFlight:
    if launch is None:
        return next(steps)
    if launch.work is not None:
        launch.work.wait()
    return steps.send(launch.value)
