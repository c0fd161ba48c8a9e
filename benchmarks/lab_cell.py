"""What the lab and its ranks say to each other: a cell of the matrix to measure, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.models import MODELS
from benchmarks.peers.base import Task

STOPPED = "stopped: another rank failed"


@dataclass(frozen=True)
class Cell:
    """One measurement: a system training a model.

    Attributes:
        warm_up_steps: steps before the measured ones, at least one; what a system has under way at the end of the first
            one, in which ranks compile for different times, is not what it usually has.
        port: where the ranks meet, on rank 0's host.
    """

    model: str
    size: str
    system: str
    optimizer: str
    learning_rate: float
    seed: int
    rate_mbit: float
    warm_up_steps: int
    steps: int
    port: int
    timeout_s: float

    def task(self) -> Task:
        return Task(
            MODELS[self.model][self.size], self.optimizer, self.learning_rate, seed=self.seed, rate_mbit=self.rate_mbit
        )


@dataclass(frozen=True)
class Measured:
    """What one rank measured.

    Attributes:
        first_step_s: from the start of `prepare` to the end of the first step, model, capture and compilation included.
        step_ms: mean time of a measured step, from the end of the last warm-up step to the end of the last step.
        each_step_ms: the same by step.
        sent_bytes: what the host's interface sent per measured step, headers included.
        peak_bytes, start_bytes: largest resident memory, and that before `prepare`.
        losses: of every step, warm-up included.
        notes: what the system decided.
    """

    first_step_s: float
    step_ms: float
    each_step_ms: tuple[float, ...]
    sent_bytes: float
    peak_bytes: int
    start_bytes: int
    losses: tuple[float, ...]
    notes: str

    @classmethod
    def of(cls, data: dict[str, Any]) -> Measured:
        """From what `dataclasses.asdict` made of one, by way of JSON."""
        values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in data.items()}
        return cls(**values)


@dataclass(frozen=True)
class Failed:
    """Why one rank measured nothing: the last line of its error, and all of it."""

    reason: str
    details: str


@dataclass(frozen=True)
class Hello:
    """A rank is ready; what it runs on, by package."""

    rank: int
    versions: dict[str, str]
