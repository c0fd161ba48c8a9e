"""Slots: places in host or device memory that hold one row each.

Contract
    Records arrive and leave in the order of the calls. On a device, only the thread that writes records waits for the
    device. Copies run concurrently with compute, on one stream per direction. Only the compute stream accesses the
    slots: it writes arrived rows into them and gathers leaving ones.
    Rows without a known next use are evicted first, then those used latest.

Shape legend: S slots; K some of them, with indices `places` (K,) on the host; records (K, B).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embrace_fx.runtime.launch.streams import Event, Streams, choose_streams
from embrace_fx.runtime.tiers.records import Records

Leaving = Callable[[], Tensor]
"""Waits for a copy of records, without row ids and checksums, and returns them."""
Leave = Callable[[Tensor | None], Leaving]
"""Starts copying records to the given memory; None allocates it."""


class Arrival(NamedTuple):
    """A started copy of memory slots (K,) and their records to the device, and the CUDA event recorded after it."""

    event: Event
    copied: tuple[Tensor, Tensor]


class Slots:
    """Slots in host memory, each of which holds one row.

    Attributes:
        columns: name -> values (S, ...) of all slots.
        pinned: whether records are copied from pinned memory.
        arriving_share: the number k such that at most 1 / k of the slots receive rows at the same time.
    """

    pinned = False
    arriving_share = 4

    def __init__(self, count: int, records: Records, device: torch.device | str = "cpu") -> None:
        self._records = records
        self.columns = {key: column.filled(count, device) for key, column in records.columns.items()}

    def copy_out(self, places: Tensor, into: Tensor | None) -> Leaving:
        """Starts copying the rows in slots `places` (K,) into records, in the memory `into` if given. Returns a
        function that waits for the copy and returns the records.
        """
        assert into is not None
        for key, of_column in self._records.unpack(into).items():
            torch.index_select(self.columns[key], 0, places, out=of_column)
        return lambda: into

    def copy_in(self, slots: Tensor, records: Tensor) -> Any:
        """Copies records into memory slots (K,), on the thread that has read them. Returns the argument of `arrive`."""
        self.put(slots, records)

    def put(self, slots: Tensor, records: Tensor) -> None:
        """Writes records into memory slots (K,)."""
        for key, values in self._records.unpack(records).items():
            self.columns[key].index_copy_(0, slots, values)

    def has_arrived(self, copy: Any) -> bool:
        """Returns whether a copy that `copy_in` has started is complete."""
        return True

    def arrive(self, copy: Any) -> None:
        """Completes a copy that `copy_in` has started, for later reads of its memory slots."""

    def to_index(self, slots: Tensor) -> Tensor:
        """Returns memory slots (K,) as an index tensor on the columns' device."""
        return slots

    def use_device(self) -> None:
        """Makes the device of the slots the current device of the calling thread."""

    def map_of_rows(self, rows: int) -> Tensor | None:
        """Returns zeros (V',) on the columns' device, for the slot of each row, or None for slots on the host."""
        return None


class DeviceSlots(Slots):
    """Slots in device memory. Copies to and from the host run on CUDA streams of their own."""

    pinned = True
    arriving_share = 12  # bounds the additional memory that arriving rows use until they are in their slots

    def __init__(self, count: int, records: Records, device: torch.device, streams: Streams) -> None:
        super().__init__(count, records, device)
        self._device, self._streams = device, streams

    def copy_out(self, places: Tensor, into: Tensor | None) -> Leaving:
        streams, places = self._streams, self.to_index(places)
        records = self._records.place({key: column.index_select(0, places) for key, column in self.columns.items()})
        ready = streams.record("rows to leave")
        with streams.on("offload", "rows leave"):
            streams.wait(ready)
            streams.keep(records)
            copy, left = streams.to_host(records), streams.record("rows have left")

        def leaving() -> Tensor:
            streams.wait_on_host(left)
            return copy

        return leaving

    def copy_in(self, slots: Tensor, records: Tensor) -> Arrival:
        streams = self._streams
        with streams.on("storage", "rows come"):
            copied = streams.to_device(slots), streams.to_device(records)
            return Arrival(streams.record("rows have come"), copied)

    def has_arrived(self, coming: Arrival) -> bool:
        return bool(coming.event.query())

    def arrive(self, coming: Arrival) -> None:
        """Writes copied rows into their memory slots, on the current CUDA stream, which first waits for the copy."""
        self._streams.wait(coming.event)
        self._streams.keep(*coming.copied)
        self.put(*coming.copied)

    def to_index(self, slots: Tensor) -> Tensor:
        return self._streams.to_device(slots)

    def use_device(self) -> None:
        self._streams.use_device()

    def map_of_rows(self, rows: int) -> Tensor:
        return torch.zeros(rows, dtype=torch.int32, device=self._device)


def make_slots(count: int, records: Records, device: torch.device) -> Slots:
    """Makes `count` slots, each for one row, in the memory of a device or of the host."""
    streams = choose_streams(device)
    return Slots(count, records) if streams is None else DeviceSlots(count, records, device, streams)


# -- eviction ----------------------------------------------------------------------------------------------------------


_FREE = torch.iinfo(torch.int64).max
_SOON = _FREE // 2
"""A mark is this minus the slot's next known step. Pinned slots have higher marks."""
_KNOWN = _SOON // 2
"""Slots whose next step is known have marks above this."""
_SHARE = 64
"""At least this fraction of the slots, a 64th, is evicted at a time."""


class EvictionPolicy:
    """Decides which slots to evict, and keeps the list `free` of free slots.

    A slot's mark is the number of the last call that used it. If a later step is known to use it, the mark is above all
    call numbers, and lower for a farther step. Pinned and free slots have higher marks.
    """

    def __init__(self, slots: int) -> None:
        self._marks = torch.full((slots,), _FREE, dtype=torch.int64, device="cpu")
        self.free = torch.arange(slots, dtype=torch.int32, device="cpu")
        self.step, self._call = 0, 0
        self._before, self._began = 0, 0  # the numbers of the last call before the previous step, and before this step

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the policy needs at most."""
        return self._marks.nbytes + 4 * len(self._marks)

    def begin_step(self, step_number: int) -> None:
        self.step = step_number
        self._before, self._began = self._began, self._call

    def begin_call(self) -> None:
        """Begins a call of the model. Slots that it uses count as the most recently used."""
        self._call += 1

    def use(self, slots: Tensor) -> None:
        """Marks memory slots (K,) as used by the current call."""
        marks = self._marks.index_select(0, slots)
        known = (marks > _KNOWN) & (marks < _SOON - self.step)
        self._marks.index_copy_(0, slots, torch.where(known, marks, self._call))

    @contextlib.contextmanager
    def pinned(self, slots: Tensor) -> Iterator[None]:
        """Opens a context in which memory slots (K,) are not evicted."""
        marks = self._marks.index_select(0, slots)
        self._marks.index_fill_(0, slots, _FREE - 1)
        try:
            yield
        finally:
            self._marks.index_copy_(0, slots, marks)

    def expect(self, slots: Tensor, due: int) -> None:
        """Records that step `due` will use memory slots (K,)."""
        self._marks.index_fill_(0, slots, _SOON - due)

    def take_free(self, count: int) -> Tensor:
        """Removes `count` memory slots from the list of free slots, and returns them."""
        left = len(self.free) - count
        taken, self.free = self.free[left:].to(torch.int64), self.free[:left]
        return taken

    def free_slots(self, slots: Tensor) -> None:
        """Adds memory slots (K,) to the list of free slots."""
        self._marks.index_fill_(0, slots, _FREE)
        self.free = torch.cat([self.free, slots.to(torch.int32)])

    def choose_evictions(self, count: int, due: int | None = None) -> tuple[Tensor, bool]:
        """Chooses about `count` memory slots to evict. Returns the slots, and whether more slots could be evicted.

        Args:
            due: if given, the step that needs the slots. Slots that an earlier step will use, or that the current or
                the previous step has used, are then not chosen.
        """
        # Rows that were read ahead for an earlier step may have pending gradients, so count them as used by the current
        # call.
        self._marks.masked_fill_((self._marks > _SOON - self.step) & (self._marks <= _SOON), self._call)
        marks, slots = self._marks.topk(max(count, len(self._marks) // _SHARE), largest=False)
        if due is None:
            may_go = marks <= _SOON
        else:
            may_go = (marks < _SOON - due) & ((marks <= self._before) | (marks > _KNOWN))
        return slots[may_go], bool(may_go.all())
