"""Offloads saved values between forward and backward: from the CPU to a file, from a device to pinned host memory.

Contract
    A reloaded value has the bits, sizes and strides of the offloaded one. A value's memory is free once its offload has
    been awaited. Its external storage is freed once it has been reloaded, or when nothing refers to it. Copies of one
    lane run in order, concurrently with compute and the other lane's copies.
"""

from __future__ import annotations

import os
import tempfile
import time
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.launch.recorder import RecordedCopy, Recorder
from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.vocabulary.operation_id import Lane, OperationId

SLOT_BYTES = 4096
"""Slots of a file are multiples of a page."""
PROBED_BYTES = 32 * 2**20
"""Bytes copied to measure the speed, more than a core's caches."""

Measured = tuple[float, float]
"""(bytes per millisecond, milliseconds of a copy of one byte)."""


@dataclass(frozen=True)
class ValueLayout:
    """The layout of a value in its storage, from which the value can be recreated over other memory.

    Attributes:
        size, stride, offset: a tensor's `shape`, `stride()` and `storage_offset()`.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device

    @classmethod
    def of_value(cls, value: Tensor) -> ValueLayout:
        """Returns the layout of a value."""
        return cls(value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset()), value.device)

    def view_bytes(self, data: Tensor) -> Tensor:
        """Returns a tensor with this layout whose storage is that of `data`, a tensor of bytes."""
        found = torch.empty(0, dtype=self.dtype, device=self.device)
        return found.set_(data.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Stored:
    """A tensor whose memory has been, or is being, copied to a file or to host memory (offloaded).

    Attributes:
        layout: from which the tensor is recreated.
        nbytes: the size of its storage in bytes.
        place: where its bytes are stored: a part of a file, or a host tensor.
        leaving: the copy in progress, or None once it has been awaited.
    """

    layout: ValueLayout
    nbytes: int
    place: Any
    leaving: Any = None


@dataclass(frozen=True)
class Reloading:
    """A tensor that is being copied back into memory.

    Attributes:
        stored: where its bytes are stored.
        data: the bytes of its new memory.
        ending: the copy in progress.
    """

    stored: Stored
    data: Tensor
    ending: Any


class Copies(ABC):
    """Base class of objects that offload values and reload them while compute runs."""

    def offload(self, value: Tensor, launch: OperationId, recorder: Recorder | None) -> Stored:
        """Starts copying a tensor's storage out. Returns a handle of the offloaded tensor, for `await_offload`.

        Args:
            launch: the id of the copy, for the recorder.
            recorder: records the time of the copy, or None.
        """
        data = _storage_bytes(value)
        return self._copy_out(
            Stored(ValueLayout.of_value(value), data.numel(), None), data, RecordedCopy(launch, data.numel(), recorder)
        )

    def await_offload(self, stored: Stored) -> Stored:
        """Waits until the memory of an offloaded tensor can be reused; with CUDA, only the compute stream waits.
        Returns the handle for `reload`.
        """
        self._end(stored.leaving)
        return replace(stored, leaving=None)

    def reload(self, stored: Stored, launch: OperationId, recorder: Recorder | None) -> Reloading:
        """Allocates memory for an offloaded tensor, and starts copying it back. Returns a handle for `await_reload`.

        Args:
            launch, recorder: as for `offload`.
        """
        return self._copy_back(stored, RecordedCopy(launch, stored.nbytes, recorder))

    def await_reload(self, coming: Reloading) -> Tensor:
        """Waits until a tensor has been copied back, and returns it. With CUDA, only the compute stream waits.

        Args:
            coming: the result of `reload`.
        """
        self._end(coming.ending)
        return coming.stored.layout.view_bytes(coming.data)

    def measure(self, device: torch.device) -> Measured:
        """Measures how fast tensors on a device are offloaded and reloaded. Returns the figures of the slower
        direction: (bytes per millisecond, milliseconds of a copy of one byte).
        """
        start_ms = self._slower_copy_ms(1, device)
        return PROBED_BYTES / max(self._slower_copy_ms(PROBED_BYTES, device) - start_ms, 1e-3), start_ms

    def _slower_copy_ms(self, nbytes: int, device: torch.device) -> float:
        """Offloads and reloads `nbytes`. Returns the milliseconds of the slower direction, after two untimed rounds."""
        launch = OperationId("offload", "probe", lane="offload")
        value = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        slower_ms = 0.0
        # Keep the time of the last round, because the first ones also allocate file blocks and memory.
        for _ in range(3):
            self.synchronize()
            began = time.perf_counter()
            stored = self.await_offload(self.offload(value, launch, None))
            self.synchronize()
            left = time.perf_counter()
            self.await_reload(self.reload(stored, launch, None))
            self.synchronize()
            slower_ms = max(left - began, time.perf_counter() - left) * 1e3
        return slower_ms

    @abstractmethod
    def synchronize(self) -> None:
        """Makes the host wait until compute, and all copies that were awaited, have ended."""

    @abstractmethod
    def _copy_out(self, stored: Stored, data: Tensor, watch: RecordedCopy) -> Stored:
        """Starts copying `data`, the bytes of a tensor's storage, out. Returns `stored` with `place` and `leaving` set.

        Args:
            watch: a context that records the time of the copy.
        """

    @abstractmethod
    def _copy_back(self, stored: Stored, watch: RecordedCopy) -> Reloading:
        """Starts copying an offloaded tensor back into newly allocated memory.

        Args:
            watch: a context that records the time of the copy.
        """

    @abstractmethod
    def _end(self, copying: Any) -> None:
        """Waits for a copy that `_copy_out` or `_copy_back` has started. With CUDA, only the compute stream waits.

        Args:
            copying: the `leaving` or `ending` of their result.
        """


class FileCopies(Copies):
    """Offloads values to a file that is deleted when the process ends. One thread writes and another reads.

    The file is not mapped into memory, because each newly mapped page costs a fault, which takes longer than its copy.

    Args:
        directory: the folder for the file.

    Raises:
        ValueError: the file cannot be created.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        try:
            self._file = _File(self._directory)
        except OSError as error:
            raise ValueError(
                f"spill_to: no file can be created in {str(directory)!r}: {error}. Create the directory, or pass "
                "another one."
            ) from error
        self._room = 0
        # Number of bytes -> offsets of free slots of this size.
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._threads = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=f"embrace_fx {lane}") for lane in ("offload", "reload")
        }

    def synchronize(self) -> None:
        """Does nothing, because awaiting a copy has already blocked this thread until its end."""

    def _copy_out(self, stored: Stored, data: Tensor, watch: RecordedCopy) -> Stored:
        """Starts writing the bytes of a value to a free part of the file, on the offload thread."""
        slot = self._reserve(stored.nbytes)
        leaving = self._threads["offload"].submit(_write_slot, slot, [data], watch)
        return replace(stored, place=slot, leaving=leaving)

    def _copy_back(self, stored: Stored, watch: RecordedCopy) -> Reloading:
        """Starts reading an offloaded value from the file, on the reload thread."""
        data = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
        return Reloading(stored, data, self._threads["reload"].submit(_read_slot, stored.place, data, watch))

    def _end(self, copying: Future[None]) -> None:
        """Waits for a copy in progress. If it failed, raises an error that names the folder."""
        try:
            copying.result()
        except OSError as error:
            raise RuntimeError(
                f"values offloaded to a file in {self._directory} cannot be read back: {error}. No update of this step "
                "was applied. Check the disk, pass another directory as spill_to, or raise memory_budget."
            ) from error

    def _reserve(self, nbytes: int) -> Slot:
        """Reserves a free part of the file for `nbytes` bytes, and returns it. The part becomes free again when the
        returned object is deleted.

        Raises:
            RuntimeError: the disk is full. The space is reserved here, so that a later write cannot fail for this
                reason.
        """
        length = max(-(-nbytes // SLOT_BYTES), 1) * SLOT_BYTES
        if self._free[length]:
            begin = self._free[length].pop()
        else:
            begin = self._room
            try:
                os.posix_fallocate(self._file.descriptor, begin, length)
            except OSError as error:
                raise RuntimeError(
                    f"offloading {nbytes:,} bytes to {self._directory} failed, after {begin:,} bytes had been reserved "
                    f"there: {error}. Free some disk space, pass another directory as spill_to, or raise memory_budget."
                ) from error
            self._room += length
        slot = Slot(self._file, begin, nbytes)
        weakref.finalize(slot, self._free[length].append, begin)
        return slot


class _File:
    """A file without a name, which is deleted with this object."""

    def __init__(self, directory: Path) -> None:
        self.descriptor, path = tempfile.mkstemp(dir=directory)
        os.unlink(path)
        weakref.finalize(self, os.close, self.descriptor)


class Slot:
    """The range of bytes of the offload file in which one offloaded value is stored."""

    def __init__(self, file: _File, begin: int, nbytes: int) -> None:
        self._file, self._begin, self._nbytes = file, begin, nbytes

    def write(self, data: memoryview) -> None:
        """Writes `data` into this part of the file, releasing the GIL."""
        done = 0
        while done < self._nbytes:
            done += os.pwrite(self._file.descriptor, data[done:], self._begin + done)

    def read(self, data: memoryview) -> None:
        """Reads this part of the file into `data`, releasing the GIL.

        Raises:
            OSError: the file is shorter than the written bytes.
        """
        done = 0
        while done < self._nbytes:
            read = os.preadv(self._file.descriptor, [data[done:]], self._begin + done)
            if read == 0:
                there = os.fstat(self._file.descriptor).st_size
                raise OSError(f"the file has only {there:,} of {self._begin + self._nbytes:,} bytes")
            done += read


class PinnedCopies(Copies):
    """Offloads values to pinned host memory, on one CUDA stream per direction.

    torch's allocator caches pinned memory, and reuses it when the copies that use it have ended.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def synchronize(self) -> None:
        """Waits on the host until all work on the current stream has ended, including copies for which the stream
        waits.
        """
        # Wait for an event of these streams, because their device may not be the current one.
        self._streams.record("settled").synchronize()

    def _copy_out(self, stored: Stored, data: Tensor, watch: RecordedCopy) -> Stored:
        """Starts copying the bytes of a value to pinned host memory."""
        host = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu", pin_memory=data.is_cuda)
        return replace(stored, place=host, leaving=(self._copy("offload", host, data, watch), data))

    def _copy_back(self, stored: Stored, watch: RecordedCopy) -> Reloading:
        """Starts copying an offloaded value from pinned host memory to the device."""
        data = torch.empty(stored.nbytes, dtype=torch.uint8, device=stored.layout.device)
        return Reloading(stored, data, (self._copy("reload", data, stored.place, watch), data))

    def _copy(self, lane: Lane, target: Tensor, source: Tensor, watch: RecordedCopy) -> Any:
        """Starts a copy from `source` to `target` on the stream of `lane` (offload or reload). Returns an event for its
        end. `watch` is a context for the copy, which records its time.
        """
        streams = self._streams
        ready = streams.record(watch.launch, "ready")
        with streams.on(lane, watch.launch):
            streams.wait(ready)
            with watch:
                target.copy_(source, non_blocking=True)
            return streams.record(watch.launch, "done")

    def _end(self, copying: tuple[Any, Tensor]) -> None:
        """Makes the compute stream wait for a copy, so that it may overwrite the copy's source and read its target.

        Args:
            copying: (CUDA event for the end of the copy, the device tensor that it reads or writes).
        """
        self._streams.wait(copying[0])


def _storage_bytes(value: Tensor) -> Tensor:
    """Returns the whole storage of a value, as a tensor of bytes."""
    storage = value.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _write_slot(slot: Slot, data: list[Tensor], watch: RecordedCopy) -> None:
    """Writes the only tensor of `data` into its part of the file (`slot`), and removes it from the list to free it.
    `watch` records the time.
    """
    with watch:
        slot.write(data.pop().numpy().data)


def _read_slot(slot: Slot, data: Tensor, watch: RecordedCopy) -> None:
    """Reads a part of the file (`slot`) into `data`. `watch` records the time."""
    with watch:
        slot.read(data.numpy().data)
