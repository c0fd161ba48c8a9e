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
    """A started copy of rows to the device.

    Attributes:
        event: a CUDA event recorded after the copy.
        copied: memory slots (K,) and the records for them, both on the device.
    """

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
        """Starts copying the rows in slots `places` (K,) into records. Returns a function that waits for the copy and
        returns the records.

        Args:
            into: memory for the records, or None to allocate it.
        """
        assert into is not None
        for key, of_column in self._records.unpack(into).items():
            torch.index_select(self.columns[key], 0, places, out=of_column)
        return lambda: into

    def copy_in(self, slots: Tensor, records: Tensor) -> Any:
        """Copies records into memory slots (K,). Called on the thread that has read the records.

        Returns:
            The argument for `arrive`, which completes the copy.
        """
        self.put(slots, records)

    def put(self, slots: Tensor, records: Tensor) -> None:
        """Writes records into memory slots (K,)."""
        for key, values in self._records.unpack(records).items():
            self.columns[key].index_copy_(0, slots, values)

    def has_arrived(self, copy: Any) -> bool:
        """Returns whether a copy that `copy_in` has started is complete, so that `arrive` would not wait."""
        return True

    def arrive(self, copy: Any) -> None:
        """Completes a copy that `copy_in` has started: later reads of its memory slots see the new rows."""

    def to_index(self, slots: Tensor) -> Tensor:
        """Returns memory slots (K,) as an index tensor on the columns' device."""
        return slots

    def use_device(self) -> None:
        """Makes the device of the slots the current device of the calling thread."""

    def map_of_rows(self, rows: int) -> Tensor | None:
        """Returns a tensor of zeros (V',) on the columns' device, to store the memory slot of each row there. Returns
        None for slots on the host, which need no copy of this map.
        """
        return None


class DeviceSlots(Slots):
    """Slots in device memory. Copies to and from the host run on CUDA streams of their own.

    Args:
        streams: the device's streams.
    """

    pinned = True
    arriving_share = 12  # bounds the additional memory that arriving rows use until they are in their slots

    def __init__(self, count: int, records: Records, device: torch.device, streams: Streams) -> None:
        super().__init__(count, records, device)
        self._device, self._streams = device, streams

    def copy_out(self, places: Tensor, into: Tensor | None) -> Leaving:
        """Starts copying the rows in slots `places` (K,) into records on the host. Returns a function that waits for
        the copy and returns the records.

        Args:
            into: memory for the records, or None to allocate it.
        """
        streams, places = self._streams, self.to_index(places)
        records = self._records.place({key: column.index_select(0, places) for key, column in self.columns.items()})
        ready = streams.record("rows to leave")
        with streams.on("offload", "rows leave"):
            streams.wait(ready)
            streams.keep(records)
            copy, left = streams.to_host(records), streams.record("rows have left")

        def leaving() -> Tensor:
            """Waits for the copy to the host, and returns the records."""
            streams.wait_on_host(left)
            return copy

        return leaving

    def copy_in(self, slots: Tensor, records: Tensor) -> Arrival:
        """Starts copying records for memory slots (K,) to the device, on the storage stream. Returns the copy."""
        streams = self._streams
        with streams.on("storage", "rows come"):
            copied = streams.to_device(slots), streams.to_device(records)
            return Arrival(streams.record("rows have come"), copied)

    def has_arrived(self, coming: Arrival) -> bool:
        """Returns whether a copy to the device has ended."""
        return bool(coming.event.query())

    def arrive(self, coming: Arrival) -> None:
        """Writes copied rows into their memory slots, on the current CUDA stream, which first waits for the copy."""
        self._streams.wait(coming.event)
        self._streams.keep(*coming.copied)
        self.put(*coming.copied)

    def to_index(self, slots: Tensor) -> Tensor:
        """Returns memory slots (K,) as an index tensor on the device."""
        return self._streams.to_device(slots)

    def use_device(self) -> None:
        """Makes the device of the slots the current device of the calling thread."""
        self._streams.use_device()

    def map_of_rows(self, rows: int) -> Tensor:
        """Returns a tensor of zeros (V',) on the device, to store the memory slot of each row there."""
        return torch.zeros(rows, dtype=torch.int32, device=self._device)


def make_slots(count: int, records: Records, device: torch.device) -> Slots:
    """Makes `count` slots, each for one row, in the memory of a device or of the host."""
    streams = choose_streams(device)
    return Slots(count, records) if streams is None else DeviceSlots(count, records, device, streams)
