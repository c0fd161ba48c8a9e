"""The device under measurement: CUDA, or a CPU stand-in that executes the same control flow.

Contract
    Sections use CUDA through a `Device` alone. On the stand-in clocks are the host's, a busy-wait is a sleep, the link
    is a thread, and the kernels are torch's: it shows that the code runs, and no time of it means anything.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from importlib import import_module
from statistics import median
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future

CALIBRATION_MS = 5.0


class Device(Protocol):
    """The interface of a device that sections use."""

    torch: torch.device
    is_real: bool

    def synchronize(self) -> None:
        """Waits until all enqueued work has ended."""

    def time_ms(self, call: Callable[[], Any], repeats: int) -> float:
        """Returns the median time of a call on the device, after one untimed call."""

    def transfer(self, ms: float, copy: Callable[[], Any], tensors: list[Tensor]) -> Future[Any]:
        """Occupies the link for `ms`, then copies. Runs after the work enqueued so far, and concurrently with later
        work.

        Args:
            tensors: the tensors that `copy` uses, which are also the result of the future.
        """

    def reset_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        """Returns the maximum memory in use since `reset_peak`."""

    def no_host_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which a wait of the host for the device raises."""


class CudaDevice:
    """The current CUDA device. Its link is one stream, so that the transfers of all groups run one after another."""

    is_real = True

    def __init__(self) -> None:
        self.torch = torch.device("cuda", torch.cuda.current_device())
        self._link = torch.cuda.Stream()
        self._cycles_per_ms = 0.0

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def time_ms(self, call: Callable[[], Any], repeats: int) -> float:
        call()
        found = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(float(start.elapsed_time(end)))
        return median(found)

    def cycles_per_ms(self) -> float:
        """Measures once how many cycles of `torch.cuda._sleep` take a millisecond, over a time long enough to hide its
        start.
        """
        if not self._cycles_per_ms:
            cycles = 1_000_000
            took = self.time_ms(lambda: torch.cuda._sleep(cycles), 3)
            cycles = int(cycles * CALIBRATION_MS / took)
            self._cycles_per_ms = cycles / self.time_ms(lambda: torch.cuda._sleep(cycles), 5)
        return self._cycles_per_ms

    def transfer(self, ms: float, copy: Callable[[], Any], tensors: list[Tensor]) -> Future[Any]:
        cycles = int(ms * self.cycles_per_ms())
        self._link.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._link):
            if cycles:
                torch.cuda._sleep(cycles)
            copy()
            for tensor in tensors:
                for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
                    part.record_stream(self._link)
            future: Future[Any] = Future(devices=[self.torch])
            future.set_result(tensors)  # records an event for the waiting stream
        return future

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    @contextlib.contextmanager
    def no_host_sync(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class CpuStandIn:
    """Does on the CPU what `CudaDevice` does on a GPU."""

    is_real = False

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self._link = ThreadPoolExecutor(1, "link")

    def synchronize(self) -> None:
        self._link.submit(lambda: None).result()

    def time_ms(self, call: Callable[[], Any], repeats: int) -> float:
        call()
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            found.append((time.perf_counter() - start) * 1e3)
        return median(found)

    def transfer(self, ms: float, copy: Callable[[], Any], tensors: list[Tensor]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            time.sleep(ms / 1e3)
            with torch.no_grad():
                copy()
            future.set_result(tensors)

        self._link.submit(run)
        return future

    def reset_peak(self) -> None:
        """Does nothing, because the kernel never resets a process's peak memory. Each section has its own process."""

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def no_host_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


def open_device(dry_run: bool) -> Device:
    """Returns the CUDA device or, for a dry run, its replacement on the CPU.

    Raises:
        SystemExit: there is no GPU.
    """
    if dry_run:
        torch.set_num_threads(1)
        return CpuStandIn()
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.gpu needs a CUDA device: run it on a machine with a GPU and a CUDA build of "
            "torch, or pass --dry-run"
        )
    return CudaDevice()


def gpu_kernels() -> ModuleType:
    """Imports and returns the module of Triton kernels, which imports Triton."""
    return import_module("embrace_fx.runtime.kernels.gpu")
