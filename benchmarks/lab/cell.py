"""What the lab and its ranks say to each other: a system is opened, takes turns, may be recorded, and is closed.

    Open(cell)              the rank forks a process that prepares the system and warms it up  ->  Ready
    Turn(system, steps)     it goes on training, and measures                                  ->  Measured
    Record(system)          it goes on training under the system's own recorder                ->  Recorded
    Close(system)           its process ends                                                   ->  Closed

Any of them may be answered by `Failed`, after which the system is closed. Between its turns a process is stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.device.emulated import Emulated
from benchmarks.models import MODELS
from benchmarks.models.base import MoreRows
from benchmarks.peers import SYSTEMS
from benchmarks.peers.base import Recorded, Task

STOPPED = "stopped: another rank failed"


@dataclass(frozen=True)
class Cell:
    """A system that trains a model.

    Attributes:
        rate_mbit: what the rank's link carries.
        slow: how many times slower than its profile the emulated device is; 0: the rank computes on its core.
        warm_up_steps: before its first turn, at least two.
        port: where the ranks meet, on rank 0's host.
        timeout_s: for opening it, and for each of its turns.
    """

    model: str
    size: str
    system: str
    optimizer: str
    learning_rate: float
    seed: int
    rate_mbit: float
    warm_up_steps: int
    port: int
    timeout_s: float
    slow: float = 0.0

    def task(self) -> Task:
        workload, rows = MODELS[self.model][self.size], SYSTEMS[self.system].rows
        if self.slow:
            workload = Emulated(self.model, self.size, workload, self.slow)
        if rows > 1:
            workload = MoreRows(workload, rows)
        slow = self.slow or 1.0
        return Task(workload, self.optimizer, self.learning_rate, self.seed, self.rate_mbit, slow)


@dataclass(frozen=True)
class Open:
    cell: Cell


@dataclass(frozen=True)
class Turn:
    """Trains one step that does not count, for what was under way before the pause has arrived, and `steps` that do."""

    system: str
    steps: int


@dataclass(frozen=True)
class Record:
    """Trains `steps` under the system's own recorder."""

    system: str
    steps: int


@dataclass(frozen=True)
class Close:
    system: str


Command = Open | Turn | Record | Close


@dataclass(frozen=True)
class Ready:
    """A system is warm, on one rank.

    Attributes:
        first_step_s: from the start of `prepare` to the end of the first step, model, capture and compilation included.
        step_ms: of the last warm-up step.
        losses: of the warm-up steps.
        notes: what the system decided.
        predicted_ms: a step as the system itself predicts it; None where it does not.
        plan: parameter -> its strategy, of a system that has one for each.
    """

    first_step_s: float
    step_ms: float
    losses: tuple[float, ...]
    notes: str
    predicted_ms: float | None
    plan: dict[str, str]


@dataclass(frozen=True)
class Measured:
    """A turn on one rank.

    Attributes:
        step_ms: mean time of a step that counts, from the end of the one before to its own.
        each_step_ms: the same by step.
        sent_bytes: what the host's interface sent per step, headers included; of ranks that share it, an equal part.
        main_cpu_ms, other_cpu_ms: processor time per step of the thread that computes, and of all others together.
        cores_busy: of the time of all cores of the machine, the part in which they ran anything, the kernel included.
        peak_bytes, start_bytes: largest resident memory so far, and that before `prepare`.
    """

    step_ms: float
    each_step_ms: tuple[float, ...]
    sent_bytes: float
    main_cpu_ms: float
    other_cpu_ms: float
    cores_busy: float
    peak_bytes: int
    start_bytes: int

    @classmethod
    def of(cls, data: dict[str, Any]) -> Measured:
        """From what `dataclasses.asdict` made of one, by way of JSON."""
        return cls(**{**data, "each_step_ms": tuple(data["each_step_ms"])})


@dataclass(frozen=True)
class Closed:
    pass


@dataclass(frozen=True)
class Failed:
    """Why one rank measured nothing: the last line of its error, and all of it."""

    reason: str
    details: str


Answer = Ready | Measured | Recorded | Closed | Failed


@dataclass(frozen=True)
class Hello:
    """A rank is ready; what it runs on, by package."""

    rank: int
    versions: dict[str, str]
