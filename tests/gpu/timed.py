"""Moments of an emulated device that takes the time of a data sheet, as JSON: `python -m tests.gpu.timed`."""

from __future__ import annotations

import json
import time

import torch

SLEEP_MS = 20.0
SIDE = 4096


def nap() -> None:
    """On the current stream, `SLEEP_MS`: two cycles a nanosecond."""
    torch.cuda._sleep(int(SLEEP_MS * 2e6))


class Watch:
    """Milliseconds since it was made, of the device by events, and of the host."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._began, self._began_s = torch.cuda.Event(enable_timing=True), time.perf_counter()
        self._began.record()

    def device_ms(self) -> float:
        """When the current stream has done what it was given."""
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        return self._began.elapsed_time(now)

    def host_ms(self) -> float:
        return (time.perf_counter() - self._began_s) * 1e3


def one_stream() -> dict[str, float]:
    watch = Watch()
    nap()
    nap()
    enqueued_ms = watch.host_ms()
    return {"enqueued": enqueued_ms, "device": watch.device_ms(), "host": watch.host_ms()}


def two_streams() -> dict[str, float]:
    watch, beside = Watch(), torch.cuda.Stream()
    nap()
    with torch.cuda.stream(beside):
        nap()
        on_other_ms = watch.device_ms()
    return {"device": watch.device_ms(), "other": on_other_ms}


def waits_for_an_event() -> dict[str, float]:
    watch, beside = Watch(), torch.cuda.Stream()
    nap()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        nap()
        return {"device": watch.device_ms()}


def comes_late() -> dict[str, float]:
    """The host enqueues something when the device has long been idle."""
    watch = Watch()
    nap()
    time.sleep(3 * SLEEP_MS / 1e3)
    nap()
    return {"device": watch.device_ms()}


def asks() -> dict[str, float]:
    """A query says no until the time has come, however soon the stream's thread was done."""
    watch, done = Watch(), torch.cuda.Event()
    nap()
    done.record()
    time.sleep(SLEEP_MS / 2e3)
    halfway = done.query()
    while not done.query():
        pass
    return {"halfway": halfway, "host": watch.host_ms()}


def multiplies() -> dict[str, float]:
    """A product that a CPU would take a second for; ids are computed."""
    matrix, ids = torch.ones(SIDE, SIDE, device="cuda"), torch.arange(6, device="cuda").flip(0)
    watch = Watch()
    matrix @ matrix
    return {"device": watch.device_ms(), "ids": float(ids.sort()[1].tolist() == [5, 4, 3, 2, 1, 0])}


MOMENTS = (one_stream, two_streams, waits_for_an_event, comes_late, asks, multiplies)
TIMES = 3


def main() -> None:
    """Each moment some times, for on a busy machine the host may stand still in between."""
    print(json.dumps({moment.__name__: [moment() for _ in range(TIMES)] for moment in MOMENTS}))


if __name__ == "__main__":
    main()
