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
op of ATen, dropout within cuDNN. Times mean nothing. What a GPU computes in another order, or rounds otherwise, is not
shown; nor is what NCCL does within a collective, between machines, or where a rank dies.

What goes wrong is written to the file EMULATED_CUDA_FINDINGS, a line each, whatever process it was in.
"""

from __future__ import annotations

import os
from pathlib import Path

_SITE = Path(__file__).parent / "site"


def environment(
    libraries: Path,
    findings: Path,
    *,
    devices: int,
    jitter_us: int = 0,
    seed: int = 0,
    slow_stream: int = -1,
    triton: bool = False,
) -> dict[str, str]:
    """The environment of a process with emulated devices, and of its children.

    Args:
        libraries: as `build` returns it.
        findings: the file that is written, where something goes wrong.
        jitter_us: how long, at most, a stream tarries before one thing in four that it does.
        slow_stream: the stream that tarries before everything, by the number of its first use in its process.
        triton: run Triton's kernels, in its interpreter; otherwise it is as if Triton were not installed.
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
    return found | ({"TRITON_INTERPRET": "1"} if triton else {})
