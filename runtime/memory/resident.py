"""Reads the memory in use by a device's allocator or by the process, and the available memory."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_STATUS, _MEMORY = Path("/proc/self/statm"), Path("/proc/meminfo")


class _Mallinfo2(ctypes.Structure):
    """The C type `struct mallinfo2` of glibc 2.33 and later (malloc.h)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def bytes_in_use(device: torch.device) -> int:
    """Returns how many bytes of memory are in use. On a CUDA device, counts the memory of tensors. On the CPU, counts
    the memory of the whole process. Returns 0 if the number is not known.

    Without glibc's malloc, the result is the process's resident set, which does not shrink when freed blocks are kept
    for reuse.
    """
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    malloc = _mallinfo2()
    if malloc is not None:
        found = malloc()
        return int(found.uordblks) + int(found.hblkhd)
    if not _STATUS.exists():
        return 0
    return int(_STATUS.read_text().split()[1]) * resource.getpagesize()


def available_bytes() -> int:
    """Returns how many bytes of the machine's memory the kernel reports as available, or 0 if this is not known."""
    if not _MEMORY.exists():
        return 0
    found = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines())
    return 1024 * int(found["MemAvailable"].split()[0])


@cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    """Returns glibc's function that reports malloc's memory, or None if another malloc is used."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _Mallinfo2
    found: Callable[[], _Mallinfo2] = function
    return found
