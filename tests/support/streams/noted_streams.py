"""Streams without a device: they note events, waits and reads, and run everything at once on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import Tensor

from embrace_fx.runtime.launch.recorder import Clock
from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.operation_id import Lane
from tests.support.streams.stream_program import HostRead, Record, Step, StreamProgram, WaitEvent


class NotedStreams(Streams):
    """Streams of which `program` tells in which order they were given what; a launch is noted by whoever makes it."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.last: tuple[int, str] | None = None
        self.out_of_turn: dict[int, str] = {}
        self.models = WeakSet[Communicator]()
        self._stream: Lane = "compute"
        self._events = 0

    def program(self, title: str) -> StreamProgram:
        return StreamProgram(title, tuple(self.steps))

    @contextmanager
    def on(self, lane: Lane, what: object) -> Iterator[None]:
        before, self._stream = self._stream, lane
        try:
            yield
        finally:
            self._stream = before

    def record(self, *what: object) -> str:
        self._events += 1
        event = " ".join([*map(str, what), f"#{self._events}"])
        self.steps.append(Record(event, self._stream))
        return event

    def wait(self, event: str) -> None:
        self.steps.append(WaitEvent(event, self._stream))

    def keep(self, *tensors: Tensor) -> None:
        """Does nothing: no memory is used again."""

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def has_passed(self, event: str) -> bool:
        """Returns False: a host that asked would find nothing done yet."""
        return False

    def wait_on_host(self, event: str) -> None:
        self.steps.append(HostRead(event, ()))

    def read(self, event: str, copy: Tensor) -> list[Any]:
        self.wait_on_host(event)
        return copy.tolist()

    def clock(self) -> Clock:
        return Clock()

    def use_device(self) -> None:
        """Does nothing: there is none."""
