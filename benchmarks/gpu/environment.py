"""What ran, and the bandwidth of a copy: the floor of every kernel."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu.device import CudaDevice, Device
from benchmarks.gpu.section import Context

COPIED_BYTES = 2**30


def copy_bytes_per_ms(device: Device, copied_bytes: int, repeats: int) -> float:
    """Returns the bytes per millisecond that a copy on the device reads and writes."""
    source = torch.zeros(copied_bytes // 4, device=device.torch)
    target = torch.empty_like(source)
    return 2 * copied_bytes / device.time_ms(lambda: target.copy_(source), repeats)


def run(context: Context) -> None:
    device = context.device
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        versions["triton"] = version("triton")
    except PackageNotFoundError:
        versions["triton"] = None
    if isinstance(device, CudaDevice):
        properties = torch.cuda.get_device_properties(device.torch)
        nccl = torch.cuda.nccl.version()
        versions |= {
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl)),
            "gpu": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "sleep_cycles_per_ms": device.cycles_per_ms(),
        }
    context.add(kind="versions", **versions)
    copied = COPIED_BYTES if device.is_real else 2**16
    context.add(kind="copy", bytes=copied, bytes_per_ms=copy_bytes_per_ms(device, copied, context.sizes.repeats))
