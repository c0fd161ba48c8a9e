"""Breaks the launcher in one way after the other, on an emulated device, and prints what was found each time.

Run as a program: `EMULATED_CUDA_POISON=1 python -m tests.gpu.broken`, with `tests.support.emulated_cuda`'s environment.
Prints a JSON object: by way, the findings.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from embrace_fx.runtime.launch import stream_queue
from embrace_fx.runtime.launch.streams import Streams
from tests.gpu.stress import overwritten

WINDOWS = 4


@contextmanager
def sound() -> Iterator[None]:
    yield


@contextmanager
def no_stream_waits() -> Iterator[None]:
    with patch.object(Streams, "wait", lambda self, event: None):
        yield


@contextmanager
def no_record_stream() -> Iterator[None]:
    with patch.object(Streams, "keep", lambda self, *tensors: None):
        yield


@contextmanager
def what_is_sent_is_freed_at_once() -> Iterator[None]:
    enqueue = stream_queue.StreamQueue._enqueue

    def forgetting(self: Any, ticket: Any, *how: Any) -> None:
        enqueue(self, ticket, *how)
        ticket.held = ()

    with patch.object(stream_queue.StreamQueue, "_enqueue", forgetting):
        yield


@contextmanager
def the_event_of_a_launch_is_recorded_before_it() -> Iterator[None]:
    enqueue = stream_queue.StreamQueue._enqueue

    def early(self: Any, ticket: Any, *how: Any) -> None:
        with self.streams.on(ticket.id.lane, "early"):
            ended = self.streams.record("too early")
        enqueue(self, ticket, *how)
        ticket.ended = ended

    with patch.object(stream_queue.StreamQueue, "_enqueue", early):
        yield


BROKEN: tuple[Callable[[], Any], ...] = (
    sound,
    no_stream_waits,
    no_record_stream,
    what_is_sent_is_freed_at_once,
    the_event_of_a_launch_is_recorded_before_it,
)


def copies_from_one_buffer() -> None:
    """A pinned buffer is written again while a copy from it is still to come."""
    device = torch.device("cuda", 0)
    buffer = torch.zeros(1000, dtype=torch.int64).pin_memory()
    torch.cuda._sleep(200_000_000)
    for number in range(2):
        buffer.fill_(number)
        buffer.to(device, non_blocking=True)
    torch.cuda.synchronize()


def copies_from_new_buffers() -> None:
    streams = Streams(torch.device("cuda", 0))
    torch.cuda._sleep(200_000_000)
    sent = [streams.up(torch.tensor([number] * 1000)) for number in range(20)]
    assert [int(each[0]) for each in sent] == list(range(20))


def main(arguments: Sequence[str]) -> None:
    path, found = Path(os.environ["EMULATED_CUDA_FINDINGS"]), {}

    def new() -> list[str]:
        torch.cuda.synchronize()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        path.unlink(missing_ok=True)
        return [line.partition("] ")[2] for line in text.splitlines()]

    for each in BROKEN:
        with each():
            overwritten(WINDOWS)
        found[each.__name__] = new()
    for copies in (copies_from_new_buffers, copies_from_one_buffer):
        copies()
        found[copies.__name__] = new()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
