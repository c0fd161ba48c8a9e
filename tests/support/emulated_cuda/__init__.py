"""CUDA devices on a machine without one, under torch's own build for CUDA: tests alone, nothing of it ships.

Real are: c10's caching allocator and pinned memory, `torch.cuda`, autograd's rules for streams, `record_stream`,
`set_sync_debug_mode`, ProcessGroupNCCL with its watchdog, and all of embrace_fx. Emulated, by libraries that the loader
finds before NVIDIA's (`build.py`):

    the runtime   device memory is the host's, a stream is a thread, an event a flag. Every use of memory is checked for
                  order by vector clocks (`hazards.h`), whatever happened to occur; waits of the host are counted
    NCCL          a communicator is a mesh of Unix sockets. One collective runs on a device at a time, and two that
                  nothing orders are reported
    kernels       an op of ATen is computed by the CPU's kernel, on the stream's thread, when its turn comes. Triton's
                  kernels run in its interpreter, if that is asked for, while the host waits

Not emulated, and refused by name: CUDA graphs, memory pools, memory shared by processes, kernels of torch that are no
op of ATen, dropout within cuDNN. Times mean nothing, but in a timed run. What a GPU computes in another order, or
rounds otherwise, is not shown; nor is what NCCL does within a collective, between machines, or where a rank dies.

A timed run (`Times`) has things take the time of a data sheet, and is for that alone: floating-point numbers are not
computed and not sent, but for small tensors; nothing is checked for order. Ids, counts and flags are right.

What goes wrong is written to the file EMULATED_CUDA_FINDINGS, a line each, whatever process it was in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from embrace_fx.cost.devices import DEVICES

_SITE = Path(__file__).parent / "site"


@dataclass(frozen=True)
class Times:
    """The time that things take.

    Attributes:
        device: a name of `embrace_fx.cost.DEVICES`, whose rates in float32 kernels reach the attained share of.
        gigabits: per second, that a rank can send; its collectives follow one another.
        latency_us: start-up of a message of a collective.
        kernel_us: of a kernel, from its start to the next one's where neither does anything.
        slow: how many times longer all of that takes.
    """

    device: str = "H100"
    gigabits: float = 100.0
    latency_us: float = 20.0
    kernel_us: float = 2.0
    slow: float = 1.0

    def variables(self) -> dict[str, str]:
        """Returns the environment variables for the emulation's options (`times.cpp`)."""
        device = DEVICES[self.device]
        values = {
            "MEMORY_GBS": device.compute.moved_bytes_per_ms / 1e6,
            "TFLOPS": device.compute.flops_per_ms / 1e9,
            "MEMORY_MB": device.memory_bytes / 2**20,
            "LINK_GBS": self.gigabits / 8,
            "LINK_US": self.latency_us,
            "LAUNCH_US": self.kernel_us,
            "SLOW": self.slow,
        }
        return {f"EMULATED_CUDA_{name}": f"{value:g}" for name, value in values.items()}


def environment(
    libraries: Path,
    findings: Path,
    *,
    devices: int,
    jitter_us: int = 0,
    seed: int = 0,
    slow_stream: int = -1,
    triton: bool = False,
    times: Times | None = None,
) -> dict[str, str]:
    """The environment of a process with emulated devices, and of its children.

    Args:
        libraries: as `build` returns it.
        findings: the file that is written, where something goes wrong.
        jitter_us: how long, at most, a stream tarries before one thing in four that it does.
        slow_stream: the stream that tarries before everything, by the number of its first use in its process.
        triton: run Triton's kernels, in its interpreter; otherwise it is as if Triton were not installed.
        times: of a timed run.
    """
    found = os.environ | {
        "LD_LIBRARY_PATH": str(libraries),
        "LD_PRELOAD": " ".join(str(libraries / name) for name in ("libcudart.so.13", "libnccl.so.2", "libcudnn.so")),
        "PYTHONPATH": str(_SITE),
        "OMP_NUM_THREADS": "1",
        "EMULATED_CUDA_OPS": str(libraries / "ops.so"),
        "EMULATED_CUDA_ALLOCATOR": str(libraries / "allocator.so"),
        "EMULATED_CUDA_FINDINGS": str(findings),
        "EMULATED_CUDA_DEVICES": str(devices),
        "EMULATED_CUDA_JITTER_US": str(jitter_us),
        "EMULATED_CUDA_SEED": str(seed),
        "EMULATED_CUDA_SLOW_STREAM": str(slow_stream),
    }
    return found | ({"TRITON_INTERPRET": "1"} if triton else {}) | (times.variables() if times else {})
