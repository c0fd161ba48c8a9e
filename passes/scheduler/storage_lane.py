"""Adds reads and writes of storage to a step graph, for tables larger than memory.

Contract
    A table has one read and one write operation per window, in one lane. A read is submitted some windows before the
    lookups that need it, as far as the loader is ahead and slots have room; otherwise in the middle of the program,
    which waits for it. A write follows the lookups that have taken its rows' slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from embrace_fx.cost.storage import RowMemory, StorageTier
from embrace_fx.vocabulary.operation_id import BETWEEN, OperationId, storage_id
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph

MOST_AHEAD = 2
"""Reads are submitted at most this many windows early; the lane has a steady rate, so more would gain nothing."""
WRITES_BEHIND = 2
"""Writes may fall behind by this many windows; then lookups wait for slots."""


def set_read_ahead(memory: RowMemory, batches: int, world_size: int) -> RowMemory:
    """Decides how many steps in advance rows are read from storage. This is the number of later batches whose rows all
    ranks know, limited to `MOST_AHEAD` and to what memory has room for. Returns a copy of `memory` with this number.

    Args:
        batches: how many batches the data loader is ahead. With several ranks, rows of the last of these batches are
            not known in time, because ranks exchange the ids one call later.
        world_size: the number of ranks.
    """
    room = memory.slots // max(memory.at_once, 1) - 1
    return replace(memory, ahead=max(0, min(batches - (world_size > 1), room, MOST_AHEAD)))


def with_measured_speed(table: str, memory: RowMemory, byte_ms: Mapping[OperationId, float]) -> RowMemory:
    """Returns a copy of `memory` in which the speed of storage is the measured speed of reading and writing rows.

    Args:
        table: the table's name.
        memory: how many rows of the table are in memory, and the predicted speed of its storage.
        byte_ms: maps a read or write operation to its measured milliseconds per byte.
    """
    read, write = (byte_ms.get(storage_id(kind, table), 0.0) * memory.record_bytes for kind in ("read", "write"))
    first, *others = memory.storage
    bytes_ms = memory.record_bytes * first.byte_ms
    first = StorageTier(first.name, read or first.read_ms + bytes_ms, write or first.write_ms + bytes_ms)
    return replace(memory, storage=(first, *others))


def add_storage_operations(steps: StepGraph, memory: Mapping[str, RowMemory]) -> StepGraph:
    """Returns a copy of the step graph that includes the reads and writes of rows in storage, for tables larger than
    memory.

    Args:
        memory: maps each table larger than memory to the number of its rows in memory and the speed of its storage.
    """
    operations, dependences = [*steps.operations], [*steps.dependences]
    for table, of in memory.items():
        readers = lookup_operations(steps, table)
        read, write = storage_id("read", table), storage_id("write", table)
        nbytes = round(of.moved_bytes)
        for each, ms in ((read, of.read_ms), (write, of.write_ms)):
            operations.append(Operation.from_id(each, ms, nbytes, (table,)))
        before, distance = (str(BETWEEN), 0) if of.ahead else _previous_compute(steps, readers[0])
        dependences += [Dependence(before, str(read), distance)]
        dependences += [Dependence(str(read), each, of.ahead) for each in readers]
        dependences += [Dependence(readers[-1], str(write)), Dependence(str(write), readers[0], WRITES_BEHIND)]
    return replace(steps, operations=tuple(operations), dependences=tuple(dependences))


def lookup_operations(steps: StepGraph, table: str) -> list[str]:
    """Returns the names of the compute operations of a step that look up a table's rows, in order. In a single process,
    this is only the first operation of the forward.
    """
    sent = {o.name for o in steps.operations if o.kind == "lookups" and table in o.serves}
    found = {d.before for d in steps.dependences if d.after in sent and d.before in steps.compute_order}
    if not sent:
        found = {next(name for name in steps.compute_order if steps[name].kind == "forward")}
    return sorted(found, key=steps.compute_order.index)


def _previous_compute(steps: StepGraph, name: str) -> tuple[str, int]:
    """Returns (the compute operation before the operation `name`, 1 if it is in the previous window or else 0). A
    window is a backward and the next forward.
    """
    place = steps.compute_order.index(name)
    return steps.compute_order[place - 1], int(place == 0)
