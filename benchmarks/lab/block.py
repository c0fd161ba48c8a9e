"""One block of the lab: all systems of a model are opened and warmed up, take turns, and are closed."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.lab.cell import Answer, Close, Command, Failed, Measured, Open, Ready, Record, Turn
from benchmarks.lab.hosts import Crew, CrewFailed
from benchmarks.lab.kept import Kept, Opened
from benchmarks.lab.settings import Block, Setting
from benchmarks.peers import SYSTEMS
from benchmarks.peers.base import Recorded

RECORDED_SYSTEM, RECORDED_STEPS = "embrace_2d", 4
"""Its timeline and the dependences of its step are taken after the last round."""

RANK_BYTES = 300 * 2**20
"""What a rank of a system may take. Where memory ends, the kernel would end some process, not only of the lab's."""

A = TypeVar("A")


class SystemFailed(Exception):
    """Raised if a system cannot be measured, with the reason and all that the system has printed."""

    def __init__(self, reason: str, details: str = "") -> None:
        super().__init__(reason)
        self.details = details


@dataclass
class BlockRun:
    """Measures what is missing of a block, and stores it in `kept`.

    Attributes:
        crews: environment -> its ranks. An environment whose ranks have died is removed.
        run_id: the id of this run. Only systems of the same run and round are compared.
        describe: called with the name of the system that runs.
        advance: called after each cell.
        say: called with messages for the user.
        fail: called for a system that did not run, with its name, the reason and details.
        unlimited: lifts the limits of the network.
    """

    setting: Setting
    block: Block
    kept: Kept
    crews: dict[str, Crew]
    run_id: str
    describe: Callable[[str], None]
    advance: Callable[[], None]
    say: Callable[[str], None]
    fail: Callable[[str, str, str], None]
    unlimited: Callable[[], AbstractContextManager[None]]
    _steps: dict[str, int] = field(default_factory=dict)

    def measure(self, missing: list[tuple[int, str]], until: float) -> None:
        """Opens the systems of `missing` (round, system), and gives them turns until the time `until` (of
        `time.monotonic`).

        Every opened system gets a first turn, even after that time, because opening takes longer than a turn and is not
        stored.
        """
        first_round = min((round_ for round_, _ in missing), default=0)
        for system in dict.fromkeys(system for _, system in missing):
            if time.monotonic() < until:
                self._guarded(system, partial(self._open, system))
        for round_, system in missing:
            if system in self._steps and (round_ == first_round or time.monotonic() < until):
                self._guarded(system, partial(self._turn, round_, system))
            self.advance()
        if RECORDED_SYSTEM in self._steps:
            self._guarded(RECORDED_SYSTEM, self._record)
        # An interrupt skips this loop, because a reply may be incomplete, and the ranks are killed next.
        for system in list(self._steps):
            with suppress(CrewFailed, SystemFailed, KeyError):
                self._ask(system, Close(system))

    def _guarded(self, system: str, do: Callable[[], None]) -> None:
        try:
            do()
        except SystemFailed as error:
            self._steps.pop(system, None)
            self.fail(system, str(error), error.details)
        except CrewFailed as error:
            environment = SYSTEMS[system].environment
            self.crews.pop(environment, None)
            for other in [s for s in {system, *self._steps} if SYSTEMS[s].environment == environment]:
                self._steps.pop(other, None)
                self.fail(other, f"at {system}: {error}", "")

    def _open(self, system: str) -> None:
        self.describe(f"{self.block.title}: opening {system}")
        needed, available = self.block.ranks * RANK_BYTES, available_bytes()
        if available < needed:
            raise SystemFailed(
                f"{self.block.ranks} more processes need {needed / 2**30:.1f} GiB of memory, but {len(self._steps)} "
                f"open systems leave {available / 2**30:.1f} GiB: measure it in a smaller group"
            )
        cell = self.setting.cell(self.block, system, _free_port())
        began = time.monotonic()
        # Broadcasting the model over slow links would take minutes, and is not part of a step.
        lifts = self.block.slow and not SYSTEMS[system].measures_links
        with self.unlimited() if lifts else nullcontext():
            ready = _all(Ready, self._ask(system, Open(cell)))
        self.kept.opened(
            self.block,
            system,
            Opened(
                max(rank.first_step_s for rank in ready),
                tuple(sum(step) / len(ready) for step in zip(*(rank.losses for rank in ready), strict=True)),
                ready[0].notes,
                ready[0].predicted_ms,
                ready[0].plan,
            ),
        )
        warm_ms = median(rank.step_ms for rank in ready)
        steps = ceil(self.setting.turn_ms / max(warm_ms, 1e-3))
        self._steps[system] = min(self.setting.most_steps, max(self.setting.fewest_steps, steps))
        self.say(
            f"{self.block.title}: {system} open after {time.monotonic() - began:.0f} s, {warm_ms:,.0f} ms per step"
        )

    def _turn(self, round_: int, system: str) -> None:
        self.describe(f"{self.block.title}: round {round_ + 1}, {system}")
        load = os.getloadavg()[0]
        ranks = _all(Measured, self._ask(system, Turn(system, self._steps[system])))
        self.kept.measured(self.block, system, round_, {"run": self.run_id, "at": time.time(), "load": load}, ranks)

    def _record(self) -> None:
        self.describe(f"{self.block.title}: timeline of {RECORDED_SYSTEM}")
        recorded = _all(Recorded, self._ask(RECORDED_SYSTEM, Record(RECORDED_SYSTEM, RECORDED_STEPS)))
        self.kept.recorded(self.block, recorded[0])

    def _ask(self, system: str, command: Command) -> tuple[Answer, ...]:
        answers = self.crews[SYSTEMS[system].environment].ask(command, self.setting.timeout_s)
        if isinstance(answers[0], Failed):
            raise SystemFailed(answers[0].reason, answers[0].details)
        return answers


def _all(kind: type[A], answers: tuple[Any, ...]) -> tuple[A, ...]:
    assert all(isinstance(answer, kind) for answer in answers), answers
    return answers


def available_bytes() -> int:
    """Returns the bytes of memory that new processes can use without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise KeyError("/proc/meminfo has no line MemAvailable")


_ports = itertools.count(20_000)
"""Below those that systems take for connections of their own, and none twice."""


def _free_port() -> int:
    """Returns a port at which a system's ranks can meet, free on this machine's loopback and on a separate host."""
    for port in _ports:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError  # unreachable, because `_ports` is infinite
