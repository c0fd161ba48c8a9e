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
        rate_mbit: the rate of the rank's link.
        slow: the factor by which the emulated device is slower than its profile; 0 if the rank computes on its core.
        warm_up_steps: the number of steps before the first turn, at least two.
        port: where the ranks meet, on rank 0's host.
        timeout_s: the time limit for opening the system, and for each of its turns.
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
    """Trains one step that is not measured, which completes communication started before the pause, and then `steps`
    measured ones.
    """

    system: str
    steps: int


@dataclass(frozen=True)
class Record:
    """Trains `steps` steps under the recorder of the system."""

    system: str
    steps: int


@dataclass(frozen=True)
class Close:
    system: str


Command = Open | Turn | Record | Close


@dataclass(frozen=True)
class Ready:
    """One rank's report after the warm-up of a system.

    Attributes:
        first_step_s: from the start of `prepare` to the end of the first step, model, capture and compilation included.
        step_ms: the time of the last warm-up step.
        losses: the losses of the warm-up steps.
        notes: what the system decided.
        predicted_ms: the step time that the system itself predicts, or None.
        plan: parameter -> its strategy, for systems with a strategy for each parameter.
    """

    first_step_s: float
    step_ms: float
    losses: tuple[float, ...]
    notes: str
    predicted_ms: float | None
    plan: dict[str, str]


@dataclass(frozen=True)
class Measured:
    """The measurements of a turn on one rank.

    Attributes:
        step_ms: mean time of a measured step, from the end of the previous step to its own end.
        each_step_ms: the time of each measured step.
        sent_bytes: what the host's interface sent per step, headers included; of ranks that share it, an equal part.
        main_cpu_ms, other_cpu_ms: processor time per step of the thread that computes, and of all others together.
        cores_busy: the share of the time of all cores of the machine in which they were busy, including work of the
            kernel.
        peak_bytes, start_bytes: the maximum resident memory so far, and the resident memory before `prepare`.
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
        """Creates measurements from the result of `dataclasses.asdict`, read from JSON."""
        return cls(**{**data, "each_step_ms": tuple(data["each_step_ms"])})


@dataclass(frozen=True)
class Closed:
    pass


@dataclass(frozen=True)
class Failed:
    """The reason why a rank measured nothing: the last line of its error, and the whole text."""

    reason: str
    details: str


Answer = Ready | Measured | Recorded | Closed | Failed


@dataclass(frozen=True)
class Hello:
    """The message of a rank that is ready, with the versions of its packages."""

    rank: int
    versions: dict[str, str]
