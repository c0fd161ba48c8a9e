"""Proves a stream program: every use of a value on another stream than the one before it is ordered by events.

Contract
    Happens-before is what the device promises: a stream runs in the order in which it was enqueued, and what follows a
    wait on a stream follows what preceded the event's record on its stream. Each record gets a vector clock; one record
    happens before another exactly if its clock is part of the other's. Edges go from earlier to later records only, so
    a program that passes has no cycle.

    A value is one piece of memory: to write it is ordered after all earlier uses, to read it after the last write.

Each check returns what it finds, in the grammar of errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tests.support.streams.stream_program import HostRead, Kernels, Launch, Record, Step, StreamProgram, WaitEvent

Clock = dict[str, int]
"""By stream, how many of its records have certainly ended."""


@dataclass(frozen=True)
class _Use:
    stream: str
    at: int  # index of the access on its stream
    text: str

    def before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.at


@dataclass
class _Memory:
    """What is known of one value: its last write, and the reads since."""

    write: _Use | None = None
    reads: list[_Use] = field(default_factory=list)

    def uses(self) -> list[_Use]:
        return [*([self.write] if self.write else []), *self.reads]


def hazards(program: StreamProgram) -> list[str]:
    """Uses of values that nothing orders, and events that are waited for before they are recorded."""
    return _Run(program).found


def too_many_in_flight(program: StreamProgram, limit: int, ordered: Collection[str] | None = None) -> list[str]:
    """Launches of communication classes that may run beside more than `limit` - 1 launched before them."""
    launched = [each for each in _Run(program).launched if ordered is None or each[0].op in ordered]
    found = []
    for place, (launch, began, _) in enumerate(launched):
        if place >= limit and not launched[place - limit][2].before(began):
            earlier = launched[place - limit][0]
            found.append(
                f"more than {limit} launches may be in flight: {launch.op!r} may begin before {earlier.op!r}, launched "
                f"{limit} places earlier, has ended. Let its stream wait for the event of {earlier.op!r}."
            )
    return found


class _Run:
    """One pass over a program."""

    def __init__(self, program: StreamProgram) -> None:
        self.found: list[str] = []
        self.launched: list[tuple[Launch, Clock, _Use]] = []  # (launch, clock at its start, use)
        self._clocks: dict[str, Clock] = defaultdict(dict)
        self._events: dict[str, Clock] = {}
        self._memory: dict[str, _Memory] = defaultdict(_Memory)
        for step in program.steps:
            self._step(step)

    def _step(self, step: Step) -> None:
        match step:
            case Launch(stream, op, reads, writes):
                began = dict(self._clocks[stream])
                use = self._enqueue(stream, f"launch {op!r} on stream {stream!r}")
                self._access(use, self._clocks[stream], reads, writes)
                if stream != "compute":
                    self.launched.append((step, began, use))
            case Kernels(op, reads, writes, stream):
                use = self._enqueue(stream, f"{op!r} on stream {stream!r}")
                self._access(use, self._clocks[stream], reads, writes)
            case Record(event, stream):
                self._events[event] = dict(self._clocks[stream])
            case WaitEvent(event, stream):
                clock = self._clocks[stream]
                for other, at in self._passed(event, f"stream {stream!r}").items():
                    clock[other] = max(clock.get(other, 0), at)
            case HostRead(event, reads):
                clock = self._passed(event, "the host")
                for value in reads:
                    self._check_read(value, f"the host's read after event {event!r}", clock)

    def _enqueue(self, stream: str, text: str) -> _Use:
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        return _Use(stream, clock[stream], text)

    def _passed(self, event: str, who: str) -> Clock:
        if event not in self._events:
            self.found.append(
                f"{who} waits for event {event!r}, which is not recorded: in CUDA such a wait has no "
                "effect. Record it first."
            )
        return self._events.get(event, {})

    def _access(self, use: _Use, clock: Clock, reads: Sequence[str], writes: Sequence[str]) -> None:
        for value in reads:
            if value not in writes:
                self._check_read(value, use.text, clock)
                self._memory[value].reads.append(use)
        for value in writes:
            memory = self._memory[value]
            for earlier in memory.uses():
                if not earlier.before(clock):
                    self._report(value, "written", use.text, earlier)
            memory.write, memory.reads = use, []

    def _check_read(self, value: str, who: str, clock: Clock) -> None:
        write = self._memory[value].write
        if write is not None and not write.before(clock):
            self._report(value, "read", who, write)

    def _report(self, value: str, what: str, who: str, earlier: _Use) -> None:
        self.found.append(
            f"{value!r} is {what} by {who}, and no event orders this after {earlier.text}. Record one on stream "
            f"{earlier.stream!r} and wait for it."
        )
