"""What a working set does with its rows, noted and checked: none is used before it is there, none leaves too early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from embrace_fx.runtime.tiers.working_set import WorkingSet


@dataclass(frozen=True)
class Event:
    """One thing done to rows.

    Attributes:
        step: of which it was, or that rows are due in.
    """

    kind: Literal["step", "ask", "due", "load", "evict", "use"]
    rows: frozenset[int] = frozenset()
    step: int = 0


def trace(memory: WorkingSet) -> list[Event]:
    """Notes from here on what a working set does."""
    events: list[Event] = []

    def note(name: str, before: Callable[..., Event] | None, after: Callable[..., Event] | None = None) -> None:
        method = getattr(memory, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                events.append(before(*args))
            found = method(*args, **kwargs)
            if after is not None:
                events.append(after(*args))
            return found

        setattr(memory, name, noted)

    def rows(kind: Any) -> Callable[..., Event]:
        return lambda ids, *_: Event(kind, frozenset(ids.tolist()))

    note("begin_step", lambda number: Event("step", step=number))
    note("places", rows("ask"), rows("use"))
    note("read_ahead", lambda ids, due: Event("due", frozenset(ids.tolist()), due))
    note("_load", None, rows("load"))
    note("_evict", lambda slots: Event("evict", frozenset(memory.row_of[slots].tolist())))
    return events


def check(events: Sequence[Event], slots: int) -> None:
    """Fails where a row is used that is not there, leaves while a step that is known reads it and one that no step
    reads could leave, or where more are there than there are slots."""
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
            case "load":
                assert not event.rows & there, f"step {step}: rows {sorted(event.rows & there)} are there twice"
                there |= event.rows
                assert len(there) <= slots, f"step {step}: {len(there)} rows in {slots} slots"
            case "evict":
                assert event.rows <= there, f"step {step}: rows {sorted(event.rows - there)} leave that are not there"
                there -= event.rows
                assert not event.rows & asked, f"step {step}: rows {sorted(event.rows & asked)} leave that it asks for"
                early = {row for row in event.rows if due.get(row, 0) > step}
                others = {row for row in there - asked if due.get(row, 0) <= step}
                assert not (early and others), f"step {step}: {sorted(early)} leave before {sorted(others)}"
            case "use":
                assert event.rows <= there, f"step {step}: rows {sorted(event.rows - there)} are used unread"
                asked = frozenset()
