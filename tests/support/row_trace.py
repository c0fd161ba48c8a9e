"""What a working set does with its rows, noted and checked: none is used before it is there, none leaves too early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from embrace_fx.runtime.tiers.working_set import WorkingSet


@dataclass(frozen=True)
class Event:
    """One thing done to rows.

    Attributes:
        step: which begins, or that rows are due in.
    """

    kind: Literal["step", "ask", "due", "come", "leave", "use"]
    rows: frozenset[int] = frozenset()
    step: int = 0


def trace(memory: WorkingSet) -> list[Event]:
    """Notes from here on what is asked of a working set, and which rows its slots have then."""
    events: list[Event] = []
    places, read_ahead, begin_step = memory.places, memory.read_ahead, memory.begin_step

    def rows(ids: Tensor) -> frozenset[int]:
        return frozenset(ids[ids >= 0].tolist())

    def note(before: frozenset[int]) -> None:
        after = rows(memory.row_of)
        assert memory._thread.waiting <= 3 * memory.part, "more rows wait to be written than memory is meant for"
        events.extend([Event("leave", before - after), Event("come", after - before)])

    def noted_places(ids: Tensor, **kwargs: Any) -> Tensor:
        events.append(Event("ask", rows(ids)))
        before = rows(memory.row_of)
        slots = places(ids, **kwargs)
        note(before)
        found = memory.row_of.index_select(0, slots)
        assert torch.equal(found, ids), "slots of other rows"
        events.append(Event("use", rows(ids)))
        return slots

    def noted_read_ahead(ids: Tensor, due: int) -> None:
        events.append(Event("due", rows(ids), due))
        before = rows(memory.row_of)
        read_ahead(ids, due)
        note(before)

    def noted_begin_step(number: int) -> None:
        events.append(Event("step", step=number))
        begin_step(number)

    for name, noted in (("places", noted_places), ("read_ahead", noted_read_ahead), ("begin_step", noted_begin_step)):
        setattr(memory, name, noted)
    return events


def check(events: Sequence[Event], slots: int) -> None:
    """Fails where a row is used that is not there, where more are there than there are slots, and where one leaves that
    a known step reads while another could leave that none reads."""
    there, asked, step = set[int](), frozenset[int](), 0
    due: dict[int, int] = {}
    for event in events:
        match event.kind:
            case "step":
                step = event.step
            case "ask":
                asked = event.rows
            case "due":
                due |= dict.fromkeys(event.rows, event.step)
            case "come":
                there |= event.rows
                assert len(there) <= slots, f"step {step}: {len(there)} rows in {slots} slots"
            case "leave":
                assert not event.rows & asked, f"step {step}: rows {sorted(event.rows & asked)} leave that it asks for"
                there -= event.rows
                early = {row for row in event.rows if due.get(row, 0) > step}
                others = {row for row in there - asked if due.get(row, 0) <= step}
                assert not (early and others), f"step {step}: {sorted(early)} leave before {sorted(others)}"
            case "use":
                assert event.rows <= there, f"step {step}: rows {sorted(event.rows - there)} are used unread"
                asked = frozenset()
