"""Rows of tables beyond memory in a step's graph: read before they are looked up, written behind.

Contract
    Reads and writes of a table are one operation each, in a lane that they share. A read is asked for some windows
    before the lookups that need it, as far as the loader is ahead and slots have room; without that, in the middle of
    the program, which waits for it. A write follows the lookups that have taken its rows' slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from embrace_fx.cost.storage import RowMemory, StorageTier
from embrace_fx.vocabulary.operation_id import BETWEEN, OperationId, storage_id
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph

MOST_AHEAD = 2
"""Windows: the lane has a steady rate, so that rows asked for earlier still come no later."""
WRITES_BEHIND = 2
"""Windows by which writes may fall behind: then lookups wait for slots."""


def read_ahead(memory: RowMemory, batches: int, world_size: int) -> RowMemory:
    """The same with the windows known by which its rows are asked for early.

    Args:
        batches: that the loader is ahead. Of several ranks each learns a call later what the others will ask for.
    """
    room = memory.slots // max(memory.at_once, 1) - 1
    return replace(memory, ahead=max(0, min(batches - (world_size > 1), room, MOST_AHEAD)))


def at_pace(table: str, memory: RowMemory, byte_ms: Mapping[OperationId, float]) -> RowMemory:
    """The same with rows read and written as fast as was measured.

    Args:
        byte_ms: milliseconds of a byte, of reads and writes.
    """
    read, write = (byte_ms.get(storage_id(kind, table), 0.0) * memory.record_bytes for kind in ("read", "write"))
    first, *others = memory.storage
    return replace(memory, storage=(StorageTier(first.name, read or first.read_ms, write or first.write_ms), *others))


def with_storage(steps: StepGraph, memory: Mapping[str, RowMemory]) -> StepGraph:
    """The window with the reads and writes of tables beyond memory."""
    operations, dependences = [*steps.operations], [*steps.dependences]
    for table, of in memory.items():
        readers = lookups(steps, table)
        read, write = storage_id("read", table), storage_id("write", table)
        nbytes = round(of.moved_bytes)
        for each, ms in ((read, of.read_ms), (write, of.write_ms)):
            operations.append(Operation.of(each, ms, nbytes, (table,)))
        before, distance = (str(BETWEEN), 0) if of.ahead else _just_before(steps, readers[0])
        dependences += [Dependence(before, str(read), distance)]
        dependences += [Dependence(str(read), each, of.ahead) for each in readers]
        dependences += [Dependence(readers[-1], str(write)), Dependence(str(write), readers[0], WRITES_BEHIND)]
    return replace(steps, operations=tuple(operations), dependences=tuple(dependences))


def lookups(steps: StepGraph, table: str) -> list[str]:
    """The compute that looks a table's rows up, in the program's order: what sends them; of one process its forward."""
    sent = {o.name for o in steps.operations if o.kind == "lookups" and table in o.serves}
    found = {d.before for d in steps.dependences if d.after in sent and d.before in steps.compute_order}
    if not sent:
        found = {next(name for name in steps.compute_order if steps[name].kind == "forward")}
    return sorted(found, key=steps.compute_order.index)


def _just_before(steps: StepGraph, name: str) -> tuple[str, int]:
    """The operation of the program before another one, and whether it is in the window before."""
    place = steps.compute_order.index(name)
    return steps.compute_order[place - 1], int(place == 0)
