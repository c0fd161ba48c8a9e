"""Streams and events of a device, as the launcher uses them.

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
"""Handed out by `record`, for `wait` and `read` of the same streams."""


class Streams(Protocol):
    """One device's streams: that of compute, and one for each communication class.

    Attributes:
        last: which launcher has launched last on the device, in its turn, and the event behind that; None: none has.
    """

    last: tuple[int, Event] | None

    def on(self, lane: Lane, what: str) -> AbstractContextManager[None]:
        """A context in which `what` is enqueued on the stream of a communication class."""

    def record(self, name: str) -> Event:
        """An event that passes when everything enqueued on the current stream has ended."""

    def wait(self, event: Event) -> None:
        """Has what is enqueued on the current stream from here on wait for the event. The host does not."""

    def keep(self, *tensors: Tensor) -> None:
        """Has memory that the current stream uses, allocated on another, not be reused before that use has ended."""

    def from_host(self, values: Sequence[int], device: torch.device) -> Tensor:
        """(V,) int64 on the device, for what is enqueued on the current stream from here on."""

    def up(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the host on the device, for what is enqueued on the current stream from here on."""

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory, on its way: to be read after an event recorded behind it has passed."""

    def reach(self, event: Event) -> None:
        """Has the host wait for the event, if it has not passed."""

    def read(self, event: Event, copy: Tensor) -> list[Any]:
        """The values of a copy, as a list. The host waits for the event if it has not passed."""

    def clock(self) -> Clock:
        """Takes moments on the current stream."""

    def use_device(self) -> None:
        """Makes the device the calling thread's, which otherwise has the first one of the machine."""


class CudaStreams:
    """The streams of a CUDA device: those of ids and embedding of high priority."""

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
    """Moments on a stream are events; their times are known once the device has caught up, at the recording's end."""

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
        if isinstance(moment, float):  # of a thread that waits for no stream
            return moment
        return self._zero_s + float(self._zero.elapsed_time(moment)) / 1e3


def streams_of(device: torch.device) -> Streams | None:
    """The streams on which collectives of a model on this device are launched; None: a thread launches them.

    The one place where that is decided.
    """
    if device.type != "cuda":
        return None
    whichever = device == torch.device("cuda")  # of one device there is one set, whatever it is called
    return _cuda_streams(torch.device("cuda", torch.cuda.current_device()) if whichever else device)


@functools.cache
def _cuda_streams(device: torch.device) -> CudaStreams:
    """One set of streams for a device, whatever runs on it: streams are few, and beyond them only order is lost."""
    return CudaStreams(device)


def first_true(mask: Tensor) -> Tensor:
    """Places at which a mask (R,) is true, in order, and behind them zeros: (R,) int64.

    What `nonzero` finds, without the host having to know how many there are.
    """
    size = mask.numel()
    places = torch.where(mask, mask.cumsum(0) - 1, size)
    found = torch.zeros(size + 1, dtype=torch.int64, device=mask.device)
    return found.scatter_(0, places, torch.arange(size, device=mask.device))[:size]
