"""The emulated 2d step for the eye: a profiler trace, and the page of the timeline."""

from __future__ import annotations

import gzip
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.emulated import emulated
from benchmarks.gpu.fabric import MODEL, SETTLED
from benchmarks.gpu.section import Context
from benchmarks.gpu.training import Running
from benchmarks.models import MODELS

STEPS = 3


def run(context: Context) -> None:
    device, sizes = context.device, context.sizes
    ranks, gigabits = sizes.ranks[0], sizes.gigabits[0]
    with emulated(device, ranks, gigabits):
        running = Running(device, "embrace 2d", MODELS[MODEL][sizes.model])
        for _ in range(SETTLED):
            running.step()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.is_real else [])]
        with profile(activities=activities) as profiled:
            for _ in range(STEPS):
                running.step()
            device.synchronize()
        trace = context.directory / "trace.json"
        profiled.export_chrome_trace(str(trace))
        _compress(trace)
        running.overlap(STEPS)
        running.compiled.timeline.save(context.directory / "timeline.html")
        running.close()
    files = ["trace.json.gz", "timeline.html"]
    context.add(kind="files", emulated=True, ranks=ranks, gigabits=gigabits, files=files)


def _compress(path: Path) -> None:
    with gzip.open(path.with_name(path.name + ".gz"), "wb") as file:
        file.write(path.read_bytes())
    path.unlink()
