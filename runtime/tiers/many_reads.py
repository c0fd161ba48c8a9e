"""Many reads of a file in one system call, so that a reading thread does not delay the training thread.

One call per record would release and take the GIL as often, and training would wait for it each time. Linux's
`io_submit` takes all reads at once. Buffered reads are complete when it returns. With RWF_NOWAIT, it skips reads that
the page cache cannot serve.

Contract
    The caller must do the reads that were skipped or failed, or all if the system call is missing.

Shape legend: K reads.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
"""System call numbers of io_setup, io_destroy, io_submit and io_getevents."""
_AT_ONCE = 256
_READ, _WITHOUT_WAIT = 0, 8
_CONTROL = np.dtype("u8, u4, u4, u2, i2, u4, u8, u8, i8, u8, u8")
"""struct iocb: number, key, flags, opcode, priority, descriptor, buffer, bytes, offset; two that stay 0."""
_NUMBER, _FLAGS, _OPCODE, _DESCRIPTOR, _BUFFER, _BYTES, _OFFSET = "f0", "f2", "f3", "f5", "f6", "f7", "f8"
_EVENT = np.dtype("u8, u8, i8, i8")
"""struct io_event: number, address of the iocb, bytes or an error below 0, 0."""
_RESULT = "f2"


class ManyReads:
    """The reads of one thread.

    Args:
        waits: whether to wait for the disk; if not, reads that need it are skipped.

    Attributes:
        calls: system call numbers, or None if they are missing or have failed.
    """

    def __init__(self, *, waits: bool = True) -> None:
        self._context = ctypes.c_ulong(0)
        self.calls = _CALLS.get(platform.machine()) if sys.platform == "linux" else None
        self._controls = np.zeros(_AT_ONCE, _CONTROL)
        self._controls[_OPCODE], self._controls[_FLAGS] = _READ, 0 if waits else _WITHOUT_WAIT
        self._events = np.zeros(_AT_ONCE, _EVENT)
        first, size = self._controls.ctypes.data, _CONTROL.itemsize
        self._pointers: Numbers = np.arange(first, first + _AT_ONCE * size, size, dtype=np.int64)
        if self.calls is not None:
            self._system = ctypes.CDLL(None, use_errno=True).syscall
            if self._call(0, ctypes.c_long(_AT_ONCE), ctypes.byref(self._context)):
                self.calls = None  # not supported by the kernel, or too many contexts exist
            else:
                weakref.finalize(self, self._system, self.calls[1], ctypes.c_ulong(self._context.value))

    def __call__(self, descriptor: int, offsets: Numbers, lengths: Numbers, buffers: Numbers) -> Numbers:
        """Reads `lengths` (K,) bytes at `offsets` (K,) to addresses `buffers` (K,). Returns the bytes read of each."""
        done = np.zeros(len(offsets), np.int64)
        if self.calls is None:
            return done
        for first in range(0, len(offsets), _AT_ONCE):
            some = slice(first, min(first + _AT_ONCE, len(offsets)))
            controls = self._controls[: some.stop - first]
            controls[_NUMBER], controls[_DESCRIPTOR] = np.arange(first, some.stop), descriptor
            controls[_BUFFER], controls[_BYTES], controls[_OFFSET] = buffers[some], lengths[some], offsets[some]
            begun = self._call(2, self._context, ctypes.c_long(len(controls)), _at(self._pointers))
            ended = 0
            while ended < begun:
                asked = [ctypes.c_long(begun - ended)] * 2
                more = self._call(3, self._context, *asked, _at(self._events[ended:]), None)
                if more < 0 and ctypes.get_errno() != errno.EINTR:
                    raise OSError(ctypes.get_errno(), "reads did not complete")
                ended += max(more, 0)
            events = self._events[: max(begun, 0)]
            done[events[_NUMBER].astype(np.int64)] = events[_RESULT].clip(min=0)
            if begun < len(controls):
                break
        return done

    def _call(self, which: int, *args: Any) -> int:
        """Makes a system call."""
        assert self.calls is not None
        return int(self._system(ctypes.c_long(self.calls[which]), *args))


def _at(values: NDArray[Any]) -> ctypes.c_void_p:
    """Returns the address of an array."""
    return ctypes.c_void_p(values.ctypes.data)
