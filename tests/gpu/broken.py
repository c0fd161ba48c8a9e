"""Breaks the launcher in one way after the other, on an emulated device, and prints what was found each time.

Run as a program: `EMULATED_CUDA_POISON=1 python -m tests.gpu.broken`, with `tests.support.emulated_cuda`'s environment.
Prints a JSON object: by way, the findings.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from embrace_fx.runtime.launch.stream_queue import StreamQueue
from embrace_fx.runtime.launch.streams import Streams
from tests.gpu.stress import overwritten

WINDOWS = 4


ENQUEUE = StreamQueue._enqueue


def forgets_what_is_sent(self: Any, ticket: Any, *how: Any) -> None:
    ENQUEUE(self, ticket, *how)
    ticket.reads = ()


def records_early(self: Any, ticket: Any, *how: Any) -> None:
    with self.streams.on(ticket.id.lane, "early"):
        ended = self.streams.record("too early")
    ENQUEUE(self, ticket, *how)
    ticket.ended = ended


BROKEN: dict[str, Callable[[], Any]] = {
    "sound": nullcontext,
    "no_stream_waits": lambda: patch.object(Streams, "wait", lambda self, event: None),
    "no_record_stream": lambda: patch.object(Streams, "keep", lambda self, *tensors: None),
    "what_is_sent_is_freed_at_once": lambda: patch.object(StreamQueue, "_enqueue", forgets_what_is_sent),
    "the_event_of_a_launch_is_recorded_before_it": lambda: patch.object(StreamQueue, "_enqueue", records_early),
}


def copies_from_one_buffer() -> None:
    """Overwrites a pinned buffer while a copy from it is still pending."""
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
    sent = [streams.to_device(torch.tensor([number] * 1000)) for number in range(20)]
    assert [int(each[0]) for each in sent] == list(range(20))


def main(arguments: Sequence[str]) -> None:
    path, found = Path(os.environ["EMULATED_CUDA_FINDINGS"]), {}

    def new() -> list[str]:
        torch.cuda.synchronize()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        path.unlink(missing_ok=True)
        return [line.partition("] ")[2] for line in text.splitlines()]

    for name, broken in BROKEN.items():
        with broken():
            overwritten(WINDOWS)
        found[name] = new()
    for copies in (copies_from_new_buffers, copies_from_one_buffer):
        copies()
        found[copies.__name__] = new()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
