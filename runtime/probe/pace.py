"""Compares a rank's measured compute speed with the cost model's estimate."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from embrace_fx.cost.links import Compute

PRODUCT, MOVED = 512, 4 * 2**20
"""The reference work: rows of the square matrices to multiply, and float32 elements to copy."""
ELEMENT_BYTES = 4
LONG_MS, TIMES = 10.0, 5
"""Least time of a measurement, and number of measurements, of which the shortest counts: an idle core is slow for tens
of ms."""


def measure_pace(device: torch.device, estimated: Compute, synchronize: Callable[[], None]) -> float:
    """Measures how fast this rank computes, relative to the cost model's estimate. Returns the ratio of the estimated
    time to the measured time. For example, 2 means that the rank is twice as fast as estimated.

    The measured work is a matrix product and a pass over memory, because models are a mixture of both.

    Args:
        estimated: the speed that the cost model assumes.
        synchronize: waits until the device has finished its work.
    """
    run = make_reference_work(device)

    def taken_ms(count: int) -> float:
        """Runs the measured work `count` times. Returns the milliseconds that it took."""
        synchronize()
        began = time.perf_counter()
        for _ in range(count):
            run()
        synchronize()
        return (time.perf_counter() - began) * 1e3

    taken_ms(1)  # warm up, because libraries initialize at the first call
    count = 1
    while taken_ms(count) < LONG_MS:
        count *= 2
    return count * expected_ms(estimated) / min(taken_ms(count) for _ in range(TIMES))


def make_reference_work(device: torch.device) -> Callable[[], None]:
    """Returns a function that runs the reference work: a matrix product, and a pass over memory."""
    matrix, target = torch.ones(PRODUCT, PRODUCT, device=device), torch.empty(MOVED, device=device)
    source = torch.ones_like(target)

    def run() -> None:
        """Runs the matrix product and the pass over memory once."""
        torch.mm(matrix, matrix)
        torch.add(source, 1.0, out=target)

    return run


def expected_ms(estimated: Compute) -> float:
    """Predicts how many milliseconds the work of `make_reference_work` takes.

    Args:
        estimated: the speed that the cost model assumes.
    """
    product_ms = estimated.time_ms(2 * PRODUCT**3, 3 * PRODUCT**2 * ELEMENT_BYTES)
    return product_ms + estimated.time_ms(0, 2 * MOVED * ELEMENT_BYTES)
