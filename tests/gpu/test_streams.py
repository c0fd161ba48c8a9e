"""Streams, events and moments of a CUDA device."""

from __future__ import annotations

import torch

from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.vocabulary.operation_id import LANES, compute_id
from tests.gpu.needs import gpus

CYCLES = 10_000_000
"""Of a device, some milliseconds."""


@gpus(1)
def test_a_class_has_a_stream_of_its_own_and_waits_for_events_alone() -> None:
    device = torch.device("cuda", 0)
    streams = Streams(device)
    used = set()
    value = torch.zeros(1, dtype=torch.int64, device=device)
    for lane in LANES[1:]:
        there = streams.record("ready")
        with streams.on(lane, "add"):
            streams.wait(there)
            torch.cuda._sleep(CYCLES)
            value.add_(1)
            used.add(torch.cuda.current_stream(device).cuda_stream)
            done = streams.record("done")
        streams.wait(done)

    assert len(used) == len(LANES) - 1
    assert torch.cuda.current_stream(device).cuda_stream not in used
    copy, copied = streams.to_host(value), streams.record("copied")
    assert copy.is_pinned()
    assert streams.read(copied, copy) == [len(LANES) - 1]


@gpus(1)
def test_a_recording_takes_the_devices_time() -> None:
    """The recorded time is the device's, not that of the host, which only enqueues work."""
    device = torch.device("cuda", 0)
    recorder = Recorder(Streams(device).clock())
    recorder.start()
    recorder.begin_window()
    torch.cuda._sleep(CYCLES)
    recorder.mark(compute_id("forward", "slept"))
    recorder.mark(compute_id("forward", "nothing"))
    (_, _, began), (_, _, slept), (_, _, nothing) = recorder.stop().marks
    assert slept - began > 1e-3
    assert nothing - slept < slept - began
