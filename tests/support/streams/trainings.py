"""Trainings whose launches are written down as a stream program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from embrace_fx.runtime.launch import streams
from embrace_fx.runtime.ranks import communicator
from tests.support.streams.recorded_streams import RecordedStreams


class Forgetful(RecordedStreams):
    """Streams that are never told of tensors that they use."""

    def keep(self, *tensors: Tensor) -> None:
        """Forgets."""


class Deaf(RecordedStreams):
    """Streams that wait for nothing on one side.

    Args:
        side: "compute", or "classes" for all streams of communication.
    """

    def __init__(self, side: str) -> None:
        super().__init__()
        self._side = side

    def wait(self, event: str) -> None:
        if (self._stream == "compute") != (self._side == "compute"):
            super().wait(event)


STREAMS: dict[str, Callable[[], RecordedStreams]] = {
    "sound": RecordedStreams,
    "forgetful": Forgetful,
    "deaf compute": functools.partial(Deaf, "compute"),
    "deaf classes": functools.partial(Deaf, "classes"),
}


@contextmanager
def on_paper(kind: str = "sound") -> Iterator[RecordedStreams]:
    """Models made within run on recorded streams."""
    before = streams.streams_of
    recorded = STREAMS[kind]()
    streams.streams_of = lambda device: recorded
    try:
        with patch.object(communicator, "backend_name", lambda group, device: "nccl"):  # an AlltoAll is one launch
            yield recorded
    finally:
        streams.streams_of = before
