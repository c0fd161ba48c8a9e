"""A rank on an emulated CUDA device: trains one system on one model, in turns at several speeds of the device.

    python -m benchmarks.lab.cuda_rank '{"model": ..., "system": ..., ...}'      (started by benchmarks/lab/cuda.py)

It is prepared, and warmed up, on a slow device; then only that changes its speed, not what was planned. It becomes
slower until two speeds agree. embrace_fx shards every table: its planner would price the host's part, which other work
of the machine changes. Prints JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.device import CudaDevice
from benchmarks.gpu.training import Running
from benchmarks.micro.host_time.counters import threads_now
from benchmarks.models import MODELS
from benchmarks.peers import SYSTEMS
from benchmarks.peers.embrace import EmbraceFx
from embrace_fx.runtime.launch import launch_queue

STANDSTILL_S = launch_queue.STANDSTILL_S
AGREES = 0.03
"""Perceived steps at two speeds of the device that differ by less show what the device takes, and not the host."""
WARM_UP_SLOW, WARM_UP_STEPS = 8.0, 14
"""embrace_fx profiles itself, and orders its launches anew at the twelfth step."""


@dataclass(frozen=True)
class CudaTurn:
    """The measurements of some steps in a row on one rank, per step. Times are not divided by `slow`.

    Attributes:
        slow: how many times longer the device and the links took than their data sheets say.
        step_ms: the time until the device had completed all steps.
        host_ms: the time until the host had enqueued all steps, without its waits.
        issuing_ms: processor time of the threads that enqueue, the training thread and autograd's, whatever else runs
            on the machine: the stand-ins' threads compute ids on the same processors.
        waited_ms: the time for which the host waited for the device.
        waits: how often the host waited for streams, for events and for copies.
        busy_ms: the time for which the compute stream was busy.
        link_ms: the time for which collectives occupied the link.
        sent_bytes: the bytes that this rank sent.
        enqueued: the number of kernels, copies and collectives.
    """

    slow: float
    step_ms: float
    host_ms: float
    issuing_ms: float
    waited_ms: float
    waits: tuple[float, ...]
    busy_ms: float
    link_ms: float
    sent_bytes: float
    enqueued: float


class Counters:
    """The counters of the emulated CUDA libraries, relative to their values when this object was created."""

    def __init__(self) -> None:
        self._runtime, self._nccl = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libnccl.so.2")
        self._before = self._now()

    def _now(self) -> list[int]:
        waits, times, link = (ctypes.c_long * 3)(), (ctypes.c_long * 4)(), (ctypes.c_long * 2)()
        self._runtime.emulated_cuda_host_waits(waits)
        self._runtime.emulated_cuda_times(times)
        self._nccl.emulated_nccl_times(link)
        return [*waits, *times, *link]

    def per_step(self, steps: int) -> list[float]:
        """Returns, per step: waits for streams, events and copies; enqueued items; ns waited; busy ns of the compute
        stream and of all streams; bytes sent; ns of the link.
        """
        return [(now - before) / steps for now, before in zip(self._now(), self._before, strict=True)]


def slow_motion(slow: float) -> None:
    """Slows the device, and everything that uses a clock, down by this factor from now on."""
    factor = ctypes.c_double(slow)
    ctypes.CDLL("libcudart.so.13").emulated_cuda_slow_motion(factor)
    launch_queue.STANDSTILL_S = STANDSTILL_S * slow


def _issuing_ms() -> float:
    """Returns the processor time so far of this thread and of autograd's threads."""
    threads, own = threads_now(), threading.get_native_id()
    return sum(each.cpu_ms for k, (name, each) in threads.items() if k == own or name.startswith("pt_autograd"))


def turn(running: Running, device: CudaDevice, slow: float, steps: int) -> CudaTurn:
    slow_motion(slow)
    dist.barrier()
    running.step()
    device.synchronize()
    counters, before, began = Counters(), _issuing_ms(), time.perf_counter()
    for _ in range(steps):
        running.step()
    issuing_ms = (_issuing_ms() - before) / steps
    enqueued_ms = (time.perf_counter() - began) * 1e3 / steps
    *waits, enqueued, waited_ns, _, _, sent_bytes, link_ns = counters.per_step(steps)
    device.synchronize()
    step_ms = (time.perf_counter() - began) * 1e3 / steps
    busy_ns = counters.per_step(steps)[5]
    return CudaTurn(
        slow=slow,
        step_ms=step_ms,
        host_ms=enqueued_ms - waited_ns / 1e6,
        issuing_ms=issuing_ms,
        waited_ms=waited_ns / 1e6,
        waits=tuple(waits),
        busy_ms=busy_ns / 1e6,
        link_ms=link_ns / 1e6,
        sent_bytes=sent_bytes,
        enqueued=enqueued,
    )


def run(options: dict[str, Any]) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("cpu:gloo,cuda:nccl")
    device = CudaDevice()
    slow_motion(WARM_UP_SLOW)
    peer = SYSTEMS[options["system"]].peer()
    if isinstance(peer, EmbraceFx):
        peer = replace(peer, strategy="alltoall")
    running = Running(device, peer, MODELS[options["model"]][options["size"]], rank)
    for _ in range(WARM_UP_STEPS if isinstance(peer, EmbraceFx) else 2):
        running.step()
    device.synchronize()
    turns: list[CudaTurn] = []
    steps_ms: list[float] = []
    for slow in options["slow"]:
        if len(steps_ms) > 1 and abs(steps_ms[-1] / steps_ms[-2] - 1) < AGREES:
            break
        of_slow = [turn(running, device, slow, options["steps"]) for _ in range(options["rounds"])]
        turns += of_slow
        step_ms = torch.tensor(median(each.step_ms for each in of_slow) / slow)
        dist.broadcast(step_ms, 0)
        steps_ms.append(step_ms.item())
    return {"turns": [asdict(each) for each in turns], "first_step_s": running.first_step_s}


def main() -> None:
    torch.set_num_threads(1)
    status = 0
    try:
        print(json.dumps(run(json.loads(sys.argv[1]))), flush=True)
    except Exception as error:  # an error of a system is a result
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr, flush=True)
        status = 1
    os._exit(status)  # threads of the emulated ranks and of NCCL never end


if __name__ == "__main__":
    main()
