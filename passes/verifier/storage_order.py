"""Verifies that a schedule reads rows from storage before they are looked up, and that memory has room for them."""

from __future__ import annotations

from collections.abc import Mapping

from embrace_fx.cost.storage import RowMemory
from embrace_fx.vocabulary.operation_id import storage_id
from embrace_fx.vocabulary.schedule import StepGraph


def check_storage(steps: StepGraph, memory: Mapping[str, RowMemory]) -> None:
    """Checks the reads from storage of tables larger than memory. Each read ends before the lookup of its rows, and
    memory always has room for the rows that are read.

    A step's rows occupy slots in memory from the submission of their read until the step's last lookup. There must also
    be slots for the rows of all steps whose reads are submitted in that time. Then no prefetched row is evicted before
    its step, because rows that no step waits for are evicted first.

    Args:
        memory: table larger than memory -> how many of its rows are in memory.

    Raises:
        ValueError: names the table and the operations.
    """
    order = {name: place for place, name in enumerate(steps.compute_order)}
    for table, of in memory.items():
        read, write = str(storage_id("read", table)), str(storage_id("write", table))
        sent = {o.name for o in steps.operations if o.kind == "lookups" and table in o.serves}
        takes = {d.before for d in steps.dependences if d.after in sent and d.before in order}
        awaited = {d.after: d.distance for d in steps.dependences if d.before == read}
        if early := sorted(takes - awaited.keys()) or ([] if awaited else [f"any lookup of {table}"]):
            raise ValueError(
                f"{read!r} does not precede {early[0]!r}, which looks up the rows that {read!r} reads into memory. Add "
                "a dependency between the two operations."
            )
        last = max(awaited, key=order.__getitem__)
        if not any((d.before, d.after, d.distance) == (last, write, 0) for d in steps.dependences):
            raise ValueError(
                f"{write!r} does not follow {last!r}, the last operation that uses the rows in memory. Add a "
                "dependency between the two operations."
            )
        asked = [(d.before, d.distance) for d in steps.dependences if d.after == read and d.before in order]
        ahead = max(awaited.values())
        held = 1 + max(
            _reads_before_lookup(order[before] - order[last], ahead + distance) for before, distance in asked
        )
        if held > 1 and held * of.at_once > of.slots:
            raise ValueError(
                f"memory has slots for {of.slots:,} rows of {table}, but {held} steps of up to {of.at_once:,} rows "
                "each need slots at the same time. Rows would be evicted before they are used. Read fewer steps ahead."
            )


def _reads_before_lookup(ahead_in_window: int, distance: int) -> int:
    """Returns how many later windows submit a read from storage while the rows that were read for one window have not
    been looked up yet. A window is a backward and the next forward.

    Args:
        ahead_in_window: the distance, in program order, from the last lookup of a window to the submission of a read;
            negative if the submission is before the lookup.
        distance: the number of windows from the submission of a read to the lookup of its rows.
    """
    return max(0, distance - (ahead_in_window > 0))
