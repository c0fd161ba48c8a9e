"""Provides CUDA streams and events: one stream for compute, and one for each class of communication.

Contract
    Only `wait_on_host` and `read` make the host wait, and their events have usually completed long before. Every call
    uses the *current* stream, which `on` changes inside its context; outside of it, this is the model's compute stream.
"""

from __future__ import annotations

import functools
import time
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from embrace_fx.runtime.launch.recorder import Clock
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.operation_id import LANES, URGENT, Lane

Event = Any
"""Returned by `record`, for `wait` and `read` of the same streams."""


class Streams:
    """The CUDA streams of a device: one for compute, and one for each class of communication. The current stream is
    read through `torch._C`, because each step reads it often, and `torch.cuda` would make more Python calls.

    Attributes:
        last: (id of a launch queue, CUDA event) for the device's last launch that was made in order, or None.
        out_of_turn: id of a launch queue -> CUDA event after its last launch that was made out of order.
        models: the communicators of all models on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._index = device, device.index
        self.last: tuple[int, Event] | None = None
        self.out_of_turn: dict[int, Event] = {}
        self.models = WeakSet[Communicator]()
        self._lanes = {lane: torch.cuda.Stream(device, priority=-1 if lane in URGENT else 0) for lane in LANES[1:]}
        self._by_id = _StreamsById()

    def are_shared(self) -> bool:
        """Returns whether several models launch on the device."""
        return sum(each.is_open for each in self.models) > 1

    def on(self, lane: Lane, what: object) -> AbstractContextManager[None]:
        """Returns a context in which the current stream is that of `lane`. `what` names the work in profiles."""
        return _OnStream(self._lanes[lane], self._index)

    def record(self, *what: object) -> Event:
        """Records an event on the current stream. It completes when all work enqueued so far has ended."""
        event = torch._C._CudaEventBase.__new__(torch.cuda.Event)
        stream = self._by_id[torch._C._cuda_getCurrentStream(self._index)]
        torch._C._CudaEventBase.record(event, stream)
        return event

    def wait(self, event: Event) -> None:
        """Makes later work on the current stream, but not the host, wait for an event."""
        stream = self._by_id[torch._C._cuda_getCurrentStream(self._index)]
        torch._C._CudaEventBase.wait(event, stream)

    def keep(self, *tensors: Tensor) -> None:
        """Prevents the memory of tensors from being reused before the current stream has read them."""
        stream = self._by_id[torch._C._cuda_getCurrentStream(self._index)]
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copies a host tensor to the device on the current stream."""
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Starts copying a tensor to pinned host memory. An event recorded after this call tells its end."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def has_passed(self, event: Event) -> bool:
        """Returns whether an event has completed, without waiting."""
        return bool(event.query())

    def wait_on_host(self, event: Event) -> None:
        """Makes the host wait for an event."""
        if not self.has_passed(event):
            event.synchronize()

    def read(self, event: Event, copy: Tensor) -> list[Any]:
        """Makes the host wait for an event, and returns the values of a host tensor, valid after it, as a list."""
        self.wait_on_host(event)
        values: list[Any] = copy.tolist()
        return values

    def clock(self) -> Clock:
        """Returns a clock that measures time on the current stream by CUDA events."""
        return _StreamClock(self._device)

    def use_device(self) -> None:
        """Makes the streams' device the current one of the calling thread."""
        torch.cuda.set_device(self._device)


class _StreamsById(dict[tuple[int, int, int], torch.cuda.Stream]):
    """A cache of stream objects by the ids (stream id, device index, device type) that `torch._C` uses."""

    def __missing__(self, key: tuple[int, int, int]) -> torch.cuda.Stream:
        stream_id, device, kind = key
        made = self[key] = torch.cuda.Stream(stream_id=stream_id, device_index=device, device_type=kind)
        return made


class _OnStream(AbstractContextManager[None]):
    """A context in which a stream and its device are current."""

    def __init__(self, stream: torch.cuda.Stream, device: int) -> None:
        self._stream, self._index = stream, device

    def __enter__(self) -> None:
        stream = self._stream
        self._device = torch._C._cuda_getDevice()
        self._before = torch._C._cuda_getCurrentStream(self._index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        torch._C._cuda_setStream(*self._before)
        if self._device != self._index:
            torch._C._cuda_setDevice(self._device)


class _StreamClock(Clock):
    """A clock for work on CUDA streams. A moment is a CUDA event, whose time is computed at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero: Any = None
        self._zero_s = 0.0

    def start(self) -> None:
        """Records a CUDA event and the host's time at the same moment, to convert later events."""
        torch.cuda.synchronize(self._device)
        self._zero_s = time.perf_counter()
        self._zero = self.now()

    def now(self) -> Any:
        """Records an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def stop(self) -> None:
        """Waits for all work of the device, so that the times of events are known."""
        torch.cuda.synchronize(self._device)

    def seconds(self, moment: Any) -> float:
        """Converts an event to seconds of the host's `time.perf_counter`."""
        if isinstance(moment, float):  # a thread without a CUDA stream has used the host's clock
            return moment
        return self._zero_s + float(self._zero.elapsed_time(moment)) / 1e3


def choose_streams(device: torch.device) -> Streams | None:
    """Returns the CUDA streams on which a model's collectives are launched, or None if the device is not CUDA."""
    if device.type != "cuda":
        return None
    whichever = device == torch.device("cuda")  # "cuda" without an index means the current device
    return _of_device(torch.device("cuda", torch.cuda.current_device()) if whichever else device)


_of_device = functools.cache(Streams)
"""Makes the set of streams of a device, shared by all models on it: a device has few streams."""
