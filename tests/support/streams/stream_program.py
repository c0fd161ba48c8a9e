"""The stream program: what one host thread enqueues on a device's streams in a few steady steps, as plain data.

    Launch(stream, op)      a collective, on the stream of its communication class
    Kernels(op)             kernels, on the stream of the model, or on one named
    Record(event, stream)   the event passes when everything enqueued on the stream before has ended
    WaitEvent(event, stream)     what is enqueued on the stream from here on waits for the event; the host does not
    HostRead(event, reads)  the host reads what was copied to pinned memory, and waits only if the event has not passed

Records stand in the order in which the host enqueues them. Streams run beside each other: only a stream's own order and
the edges from an event's record to its waits order anything. `noted_streams` notes what a launcher does,
`stream_order` proves it.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        steps: the records.
    """

    title: str
    steps: tuple[Step, ...]

    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))
