"""The stream program: what one host thread enqueues on a device's streams in a few steady steps, as plain data.

    Launch(stream, op)      a collective, on the stream of its communication class
    Kernels(op)             kernels, on the stream of the model, or on one named
    Record(event, stream)   the event passes when everything enqueued on the stream before has ended
    WaitEvent(event, stream)     what is enqueued on the stream from here on waits for the event; the host does not
    HostRead(event, reads)  the host reads what was copied to pinned memory, and waits only if the event has not passed

Records stand in the order in which the host enqueues them. Streams run beside each other: only a stream's own order and
the edges from an event's record to its waits order anything. `schedule_program` predicts a program from a
schedule, `noted_streams` notes what a launcher does, `stream_order` proves either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from embrace_fx.vocabulary.operation_id import LANES

STREAMS = LANES
"""The stream of the model's compute, and one for each communication class."""


@dataclass(frozen=True)
class Launch:
    stream: str
    op: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kernels:
    op: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    stream: str = "compute"


@dataclass(frozen=True)
class Record:
    event: str
    stream: str


@dataclass(frozen=True)
class WaitEvent:
    event: str
    stream: str


@dataclass(frozen=True)
class HostRead:
    event: str
    reads: tuple[str, ...]


Step = Launch | Kernels | Record | WaitEvent | HostRead


@dataclass(frozen=True)
class StreamProgram:
    """A sequence of records, in the order in which the host enqueues them.

    Attributes:
        title: what it is the program of.
        steps: the records; text between them is a heading.
    """

    title: str
    steps: tuple[Step | str, ...]

    def records(self) -> tuple[Step, ...]:
        """The records without headings."""
        return tuple(step for step in self.steps if not isinstance(step, str))

    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.records() if isinstance(step, Launch))


def story(program: StreamProgram) -> str:
    """The program as text, a line each: where, what, and which values it reads and writes."""
    return "\n".join([program.title, *(_line(step) for step in program.steps)])


def _line(step: Step | str) -> str:
    if isinstance(step, str):
        return f"-- {step} --"
    match step:
        case Launch(stream, op, reads, writes):
            return f"{stream:<9}  launch   {op}{_values(reads, writes)}"
        case Kernels(op, reads, writes, stream):
            return f"{stream:<9}  compute  {op}{_values(reads, writes)}"
        case Record(event, stream):
            return f"{stream:<9}    record   {event}"
        case WaitEvent(event, stream):
            return f"{stream:<9}    wait     {event}"
        case HostRead(event, reads):
            return f"{'host':<9}    read     {', '.join(reads)}, once {event}"


def _values(reads: Iterable[str], writes: Iterable[str]) -> str:
    read, written = ", ".join(reads), ", ".join(writes)
    return f"   ({read} -> {written})" if read or written else ""
