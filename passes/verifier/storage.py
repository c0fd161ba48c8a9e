"""Proves of a schedule that rows of tables beyond memory are there before they are looked up, and find room."""

from __future__ import annotations

from collections.abc import Mapping

from embrace_fx.cost.storage import RowMemory
from embrace_fx.vocabulary.operation_id import storage_id
from embrace_fx.vocabulary.schedule import StepGraph


def check_storage(steps: StepGraph, memory: Mapping[str, RowMemory]) -> None:
    """Raises where a schedule looks rows up before they are read, evicts those of a later step, or holds too many.

    Rows of a step have slots from when they are asked for until its last lookup: together with those of all steps that
    are asked for meanwhile they must be no more than there are slots. Then no row that has been read ahead has to leave
    before its step, for rows of no step leave first. Slots are as many as fit the bytes that were asked for.

    Args:
        memory: of each table beyond memory.

    Raises:
        ValueError: saying which.
    """
    order = {name: place for place, name in enumerate(steps.compute_order)}
    for table, of in memory.items():
        read, write = str(storage_id("read", table)), str(storage_id("write", table))
        sent = {o.name for o in steps.operations if o.kind == "lookups" and table in o.serves}
        takes = {d.before for d in steps.dependences if d.after in sent and d.before in order}
        awaited = {d.after: d.distance for d in steps.dependences if d.before == read}
        if early := sorted(takes - awaited.keys()) or ([] if awaited else [f"any lookup of {table}"]):
            raise ValueError(f"expected {read!r} before {early[0]!r}, which looks its rows up, found no dependence.")
        last = max(awaited, key=order.__getitem__)
        if not any((d.before, d.after, d.distance) == (last, write, 0) for d in steps.dependences):
            raise ValueError(f"expected {write!r} after {last!r}, which takes its rows' slots, found no dependence.")
        asked = [(d.before, d.distance) for d in steps.dependences if d.after == read and d.before in order]
        ahead = max(awaited.values())
        held = 1 + max(_asked_meanwhile(order[before] - order[last], ahead + distance) for before, distance in asked)
        if held > 1 and held * of.at_once > of.slots:
            raise ValueError(
                f"expected slots of {table} for the rows of {held} steps, each of at most {of.at_once:,}, found "
                f"{of.slots:,}: rows would be evicted before the step that they were read for. Read fewer steps ahead."
            )


def _asked_meanwhile(ahead_in_window: int, distance: int) -> int:
    """Counts the windows whose rows are asked for before those of this window have been looked up.

    Args:
        ahead_in_window: how many places of the program a read is asked for behind a window's last lookup, negative
            where before it.
        distance: for which window after its own.
    """
    return max(0, distance - (ahead_in_window > 0))
