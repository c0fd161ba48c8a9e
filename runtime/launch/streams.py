"""Provides the launcher with streams and events of a device.

Contract
    Nothing here makes the host wait but `reach` and `read`, whose event has as a rule long passed. Every call is about
    the *current* stream, which `on` changes for a while; outside of it that is the stream of the model's compute.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from embrace_fx.runtime.launch.recorder import Clock
from embrace_fx.vocabulary.operation_id import LANES, URGENT, Lane

Event = Any
"""Returned by `record`, for `wait` and `read` of the same streams."""


class Streams(Protocol):
    """One device's streams: that of compute, and one for each communication class.

    Attributes:
        last: (id of the launcher that has launched last on the device, the event behind that launch), or None.
    """

    last: tuple[int, Event] | None

    def on(self, lane: Lane, what: str) -> AbstractContextManager[None]:
        """Returns a context in which `what` is enqueued on the stream of a communication class."""

    def record(self, name: str) -> Event:
        """Records an event, which passes when all work enqueued on the current stream has ended."""

    def wait(self, event: Event) -> None:
        """Makes later work on the current stream, not the host, wait for the event."""

    def keep(self, *tensors: Tensor) -> None:
        """Keeps memory, allocated on another stream, from being reused before the current stream has used it."""

    def from_host(self, values: Sequence[int], device: torch.device) -> Tensor:
        """Copies values to the device, (V,) int64, for later work on the current stream."""

    def up(self, tensor: Tensor) -> Tensor:
        """Copies a host's tensor to the device, for later work on the current stream."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """Starts a copy to pinned memory, which may be read after an event recorded behind it has passed."""

    def reach(self, event: Event) -> None:
        """Makes the host wait for the event, if it has not passed."""

    def read(self, event: Event, copy: Tensor) -> list[Any]:
        """Returns the values of a copy, as a list; the host waits for the event if it has not passed."""

    def clock(self) -> Clock:
        """Takes moments on the current stream."""

    def use_device(self) -> None:
        """Makes this the calling thread's device, which is otherwise the first one of the machine."""


class CudaStreams:
    """The streams of a CUDA device; those of ids and embedding have high priority."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.last: tuple[int, Event] | None = None
        self._lanes = {lane: torch.cuda.Stream(device, priority=-1 if lane in URGENT else 0) for lane in LANES[1:]}

    @contextmanager
    def on(self, lane: Lane, what: str) -> Iterator[None]:
        with torch.cuda.stream(self._lanes[lane]):
            yield

    def record(self, name: str) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def keep(self, *tensors: Tensor) -> None:
        stream = torch.cuda.current_stream(self._device)
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def from_host(self, values: Sequence[int], device: torch.device) -> Tensor:
        return self.up(torch.tensor(values, dtype=torch.int64, device="cpu"))

    def up(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def reach(self, event: Event) -> None:
        if not event.query():
            event.synchronize()

    def read(self, event: Event, copy: Tensor) -> list[Any]:
        self.reach(event)
        values: list[Any] = copy.tolist()
        return values

    def clock(self) -> Clock:
        return _CudaClock(self._device)

    def use_device(self) -> None:
        torch.cuda.set_device(self._device)


class _CudaClock:
    """A clock whose moments are events on a stream; their times are known at the recording's end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero: Any = None
        self._zero_s = 0.0

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        self._zero_s = time.perf_counter()
        self._zero = self.now()

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stop(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, moment: Any) -> float:
        if isinstance(moment, float):  # taken by a thread without a stream
            return moment
        return self._zero_s + float(self._zero.elapsed_time(moment)) / 1e3


def streams_of(device: torch.device) -> Streams | None:
    """Decides on which streams a model's collectives on this device are launched; None: a thread launches them."""
    if device.type != "cuda":
        return None
    whichever = device == torch.device("cuda")  # each device has one set, under any of its names
    return _cuda_streams(torch.device("cuda", torch.cuda.current_device()) if whichever else device)


@functools.cache
def _cuda_streams(device: torch.device) -> CudaStreams:
    """Makes the set of streams of a device, shared by all models on it: a device has few streams."""
    return CudaStreams(device)
