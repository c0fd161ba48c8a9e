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
    """The dtype, shape, strides and device of a value, by which it can be recreated in other memory.

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
        """Returns a tensor with this layout in the memory of `data`, a tensor of bytes."""
        found = torch.empty(0, dtype=self.dtype, device=self.device)
        return found.set_(data.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Stored:
    """A tensor whose memory has been offloaded, or is being offloaded: copied to a file or to host memory.

    Attributes:
        layout: the layout with which the tensor is recreated.
        nbytes: the size of the tensor's storage in bytes.
        place: where the bytes are stored: a part of a file (`Slot`), or a host tensor.
        leaving: the copy in progress, or None once it has been awaited.
    """

    layout: ValueLayout
    nbytes: int
    place: Any
    leaving: Any = None


@dataclass(frozen=True)
class Reloading:
    """An offloaded tensor that is being copied back into memory.

    Attributes:
        stored: the handle of the offloaded tensor.
        data: the new memory of the tensor, as a tensor of bytes.
        ending: the copy in progress.
    """

    stored: Stored
    data: Tensor
    ending: Any


class Copies(ABC):
    """Base class of objects that offload values and reload them while compute runs."""

    def offload(self, value: Tensor, launch: OperationId, recorder: Recorder | None) -> Stored:
        """Starts offloading a tensor, by copying its storage. Returns a handle of the offloaded tensor, for
        `await_offload`.

        Args:
            launch: the id of the copy, for the recorder.
            recorder: records the time of the copy, or None to record nothing.
        """
        data = _storage_bytes(value)
        return self._copy_out(
            Stored(ValueLayout.of_value(value), data.numel(), None), data, RecordedCopy(launch, data.numel(), recorder)
        )

    def await_offload(self, stored: Stored) -> Stored:
        """Waits until the memory of an offloaded tensor can be reused. Returns the handle for `reload`. With CUDA, only
        the compute stream waits.

        Args:
            stored: the result of `offload`.
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
        """Measures how fast tensors on a device are offloaded and reloaded. Returns (bytes per millisecond,
        milliseconds to copy one byte) of the slower of the two directions.
        """
        start_ms = self._slower_copy_ms(1, device)
        return PROBED_BYTES / max(self._slower_copy_ms(PROBED_BYTES, device) - start_ms, 1e-3), start_ms

    def _slower_copy_ms(self, nbytes: int, device: torch.device) -> float:
        """Offloads and reloads `nbytes` bytes, after two untimed rounds. Returns the time in milliseconds of the slower
        of the two directions.
        """
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
        """Makes the host wait until all compute, and all copies that were awaited, have ended."""

    @abstractmethod
    def _copy_out(self, stored: Stored, data: Tensor, watch: RecordedCopy) -> Stored:
        """Starts offloading a tensor. Returns `stored` with the attributes `place` and `leaving` set.

        Args:
            stored: the handle of the tensor.
            data: the bytes of the tensor's storage.
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
            copying: the attribute `leaving` of the result of `_copy_out`, or `ending` of the result of `_copy_back`.
        """


class FileCopies(Copies):
    """Offloads values to a file that is deleted when the process ends. Uses one thread to write and one to read.

    The file is not mapped into memory, because each newly mapped page costs a page fault, which takes longer than its
    copy.

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
            RuntimeError: the disk is full. Disk space is reserved here, so a later write cannot fail for this reason.
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
    """Offloads values to pinned host memory. Uses one CUDA stream to offload and one to reload.

    torch's allocator caches pinned memory, and reuses it once the copies that use it have ended.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def synchronize(self) -> None:
        """Makes the host wait until all work on the current stream has ended. This includes the copies for which the
        stream waits.
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
        """Starts a copy from `source` to `target`. Returns a CUDA event that completes when the copy ends.

        Args:
            lane: the direction of the copy ("offload" or "reload"), which selects its stream.
            watch: a context that records the time of the copy.
        """
        streams = self._streams
        ready = streams.record(watch.launch, "ready")
        with streams.on(lane, watch.launch):
            streams.wait(ready)
            with watch:
                target.copy_(source, non_blocking=True)
            return streams.record(watch.launch, "done")

    def _end(self, copying: tuple[Any, Tensor]) -> None:
        """Makes the compute stream wait for a copy. Later work on that stream may overwrite the copy's source and read
        its target.

        Args:
            copying: a pair of the CUDA event at the end of the copy and the device tensor that the copy reads or
                writes.
        """
        self._streams.wait(copying[0])


def _storage_bytes(value: Tensor) -> Tensor:
    """Returns the whole storage of a value, as a tensor of bytes."""
    storage = value.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _write_slot(slot: Slot, data: list[Tensor], watch: RecordedCopy) -> None:
    """Writes a tensor to a part of the file.

    Args:
        slot: the part of the file.
        data: a list with the tensor. The tensor is removed from the list, so that its memory is freed after the write.
        watch: a context that records the time of the copy.
    """
    with watch:
        slot.write(data.pop().numpy().data)


def _read_slot(slot: Slot, data: Tensor, watch: RecordedCopy) -> None:
    """Reads a part of the file into a tensor.

    Args:
        slot: the part of the file.
        data: the tensor of bytes to overwrite.
        watch: a context that records the time of the copy.
    """
    with watch:
        slot.read(data.numpy().data)
