"""Slots: places in host or device memory that hold one row each.

Contract
    Records arrive and leave in the order of the calls. On a device, only the thread that writes records waits for the
    device. Copies run concurrently with compute, on one stream per direction. Only the compute stream accesses the
    slots: it writes arrived rows into them and gathers leaving ones.

Shape legend: S slots; K some of them, with indices `places` (K,) on the host; records (K, B).
"""

from __future__ import annotations

from collections.abc import Callable
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
