"""The values of rows in slots: in memory of the host, or of a device, to which rows come and from which they leave.

Contract
    Records come and leave in the order in which that is asked for. On a device nothing makes the host wait but the
    thread that writes what has left. Copies run beside compute, each way on a stream of its own; slots themselves are
    compute's alone, which puts into them what has come, and gathers what is to leave.

Shape legend: S slots; K of them, at places (K,) on the host; records (K, B).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embrace_fx.runtime.launch.streams import Event, Streams
from embrace_fx.runtime.tiers.records import WEIGHTS, Records

Leaving = Callable[[], Tensor]
"""Waits for records on their way out, without rows and checksums."""
Leave = Callable[[Tensor | None], Leaving]
"""Copies records to memory for them; None: to their own."""


class Arrival(NamedTuple):
    """Rows that a device has, or will have, beside their slots.

    Attributes:
        event: behind their copy.
        copied: places (K,) and what is put there.
    """

    event: Event
    copied: tuple[Tensor, Tensor]
    put: Callable[[Tensor, Tensor], None]


class Slots:
    """Slots in memory of the host.

    Attributes:
        columns: name -> (S, ...).
    """

    def __init__(self, count: int, records: Records, device: torch.device | str = "cpu") -> None:
        self._records = records
        self.columns = {key: column.filled(count, device) for key, column in records.columns.items()}

    def leave(self, places: Tensor, into: Tensor | None) -> Leaving:
        """Copies what is in slots (K,), now, into memory for their records; None: of a device."""
        assert into is not None
        for key, of_column in self._records.unpack(into).items():
            torch.index_select(self.columns[key], 0, places, out=of_column)
        return lambda: into

    def come(self, places: Tensor, records: Tensor) -> Any:
        """Puts records into slots (K,), by a thread; returns what `arrive` takes."""
        self._put(places, records)

    def _put(self, places: Tensor, records: Tensor) -> None:
        for key, values in self._records.unpack(records).items():
            self.columns[key].index_copy_(0, places, values)

    def begin(self, places: Tensor, weights: Tensor) -> Any:
        """The same of rows that begin, of which weights (K, d) are known."""
        self._put_first(places, weights)

    def _put_first(self, places: Tensor, weights: Tensor) -> None:
        for key, column in self.columns.items():
            if key == WEIGHTS:
                column.index_copy_(0, places, weights)
            else:
                column.index_fill_(0, places, self._records.columns[key].fill)

    def has_come(self, coming: Any) -> bool:
        """Tells whether nobody has to wait for it."""
        return True

    def arrive(self, coming: Any) -> None:
        """Has whoever reads slots from here on find there what has come."""

    def to_index(self, places: Tensor) -> Tensor:
        """Slots (K,) as the columns' ops take them."""
        return places


class DeviceSlots(Slots):
    """Slots in memory of a device.

    Args:
        streams: of the device.
    """

    def __init__(self, count: int, records: Records, device: torch.device, streams: Streams) -> None:
        super().__init__(count, records, device)
        self._streams = streams

    def leave(self, places: Tensor, into: Tensor | None) -> Leaving:
        streams, places = self._streams, self.to_index(places)
        records = self._records.place({key: column.index_select(0, places) for key, column in self.columns.items()})
        ready = streams.record("rows to leave")
        with streams.on("offload", "rows leave"):
            streams.wait(ready)
            streams.keep(records)
            copy, left = streams.to_host(records), streams.record("rows have left")

        def leaving() -> Tensor:
            streams.reach(left)
            return copy

        return leaving

    def come(self, places: Tensor, records: Tensor) -> Arrival:
        return self._copied(self._put, places, records)

    def begin(self, places: Tensor, weights: Tensor) -> Arrival:
        return self._copied(self._put_first, places, weights)

    def _copied(self, put: Callable[[Tensor, Tensor], None], places: Tensor, values: Tensor) -> Arrival:
        streams = self._streams
        with streams.on("storage", "rows come"):
            copied = streams.up(places), streams.up(values)
            return Arrival(streams.record("rows have come"), copied, put)

    def has_come(self, coming: Arrival) -> bool:
        return bool(coming.event.query())

    def arrive(self, coming: Arrival) -> None:
        self._streams.wait(coming.event)
        self._streams.keep(*coming.copied)
        coming.put(*coming.copied)

    def to_index(self, places: Tensor) -> Tensor:
        return self._streams.up(places)
