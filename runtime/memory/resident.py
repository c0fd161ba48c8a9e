"""How much memory there is in use: what a device's allocator has handed out, or the process's resident set."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

_STATUS = Path("/proc/self/statm")


def bytes_in_use(device: torch.device) -> int:
    """Bytes that tensors take on a device; on the CPU, of all memory of this process; 0 where the system tells none."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    if not _STATUS.exists():
        return 0
    return int(_STATUS.read_text().split()[1]) * resource.getpagesize()
