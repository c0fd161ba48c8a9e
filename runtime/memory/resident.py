"""Reads how much memory is in use: what a device's allocator, or the process's, has handed out."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

_STATUS = Path("/proc/self/statm")


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc, since 2.33 (malloc.h)."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def bytes_in_use(device: torch.device) -> int:
    """Bytes that tensors take on a device; on the CPU, all that this process has in use; 0 where nothing tells.

    The resident set, which is taken where malloc cannot be asked, does not move while freed blocks are used again.
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


@cache
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    """glibc's own count of malloc's memory; None: it is another malloc."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _Mallinfo2
    found: Callable[[], _Mallinfo2] = function
    return found
