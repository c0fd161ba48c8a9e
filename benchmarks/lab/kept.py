"""What the lab has measured so far: files under one folder, whose name changes with whatever they depend on.

<fingerprint>/<model>-<ranks>-<rate>/network.json            the network of its last run
                                     <system>.json           how it opened: first step, losses, what it decided
                                     <system>-<round>.json   one turn, all ranks
                                     <system>.failed         why it did not run, where it did not
                                     timeline.json, .svg     what embrace_fx recorded of itself, and drew
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab.cell import Measured
from benchmarks.lab.hosts import ROOT, CrewFailed, python_of
from benchmarks.lab.settings import Block, Setting
from benchmarks.namespaces import obstacle
from benchmarks.network import Reached
from benchmarks.peers import ENVIRONMENTS
from benchmarks.peers.base import Recorded

MEASURED_SOURCES = (
    "embrace_fx/**/*.py", "passes/**/*.py", "runtime/**/*.py", "benchmarks/models/*.py", "benchmarks/peers/*.py",
    "benchmarks/device/*.py", "benchmarks/device/*.json", "benchmarks/network.py", "benchmarks/lab/cell.py",
    "benchmarks/lab/rank.py", "benchmarks/lab/hosts.py",
)  # fmt: skip
"""What a measurement depends on, besides the setting and the versions."""
UNMEASURED_SOURCES = ("embrace_fx/viz/**/*",)
VERSIONED = ("torch", "numpy", "torchrec", "fbgemm-gpu-cpu", "horovod")
FREE = (
    *("name", "models", "groups", "rounds", "rounds_besides", "ranks", "rates_mbit"),
    *("elsewhere", "scaling", "not_first", "one_by_one", "extra", "slow", "slower", "ratios", "together"),
)
"""Fields of a setting that a cell does not depend on, or that its folder and file name."""


def versions() -> dict[str, dict[str, str]]:
    """Returns environment -> package -> version, for the environments that have been created."""
    found = {}
    for environment in ENVIRONMENTS:
        try:
            prefix = python_of(environment).parents[1]
        except CrewFailed:
            continue
        own = environment == "project"
        paths = sys.path if own else [str(path) for path in prefix.glob("lib/python*/site-packages")]
        packages = {
            (d.metadata["Name"] or "").lower().replace("_", "-"): d.version
            for d in importlib.metadata.distributions(path=paths)
        }
        found[environment] = {name: packages[name] for name in VERSIONED if name in packages}
    return found


def fingerprint(setting: Setting) -> str:
    """Returns a hash that changes with everything on which a measurement depends."""
    fields = {name: value for name, value in asdict(setting).items() if name not in FREE}
    left_out = {file for pattern in UNMEASURED_SOURCES for file in ROOT.glob(pattern)}
    files = sorted({file for pattern in MEASURED_SOURCES for file in ROOT.glob(pattern)} - left_out)
    parts = [json.dumps(fields, sort_keys=True), json.dumps(versions()["project"], sort_keys=True), obstacle()]
    parts += [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Opened:
    """What is known of a system after its warm-up.

    Attributes:
        first_step_s: the time of the first step on the slowest rank, including model, capture and compilation.
        losses: the losses of the warm-up steps, averaged over ranks.
        notes: the decisions of the system on rank 0.
        predicted_ms: the step time that rank 0 predicts after warm-up, or None.
        plan: parameter -> its strategy after warm-up; empty for systems without a strategy for each parameter.
    """

    first_step_s: float
    losses: tuple[float, ...]
    notes: str
    predicted_ms: float | None = None
    plan: dict[str, str] = field(default_factory=dict)

    def perceived(self, slow: float) -> Opened:
        """Returns the same in the time that the ranks perceive, which is `slow` times slower."""
        return self if self.predicted_ms is None else replace(self, predicted_ms=self.predicted_ms / slow)


@dataclass(frozen=True)
class Round:
    """A system's turn: its run, its time, and the measurements of each rank."""

    conditions: dict[str, Any]
    ranks: tuple[Measured, ...]

    @cached_property
    def step_ms(self) -> float:
        return step_ms(self.ranks)

    def is_with(self, other: Round) -> bool:
        """Returns whether both turns were measured in the same run."""
        return bool(self.conditions["run"] == other.conditions["run"])


def step_ms(ranks: tuple[Measured, ...]) -> float:
    """Returns the step time of a turn: the median over its ranks."""
    return median(rank.step_ms for rank in ranks)


@dataclass(frozen=True)
class Kept:
    """The measurements in a folder."""

    folder: Path

    def has(self, block: Block, system: str, round_: int) -> bool:
        return self._turn_file(block, system, round_).exists()

    def network(self, block: Block, reached: Reached) -> None:
        self._write(block, "network.json", asdict(reached))

    def opened(self, block: Block, system: str, found: Opened) -> None:
        self._write(block, f"{system}.json", asdict(found))
        (self.folder / block.stem / f"{system}.failed").unlink(missing_ok=True)

    def measured(
        self, block: Block, system: str, round_: int, conditions: dict[str, Any], ranks: tuple[Measured, ...]
    ) -> None:
        data = {"conditions": conditions, "ranks": [asdict(rank) for rank in ranks]}
        self._write(block, self._turn_file(block, system, round_).name, data)

    def recorded(self, block: Block, found: Recorded) -> None:
        self._write(block, "timeline.json", found.figures)
        write_whole(self.folder / block.stem / "timeline.svg", found.picture)

    def failed(self, block: Block, system: str, reason: str) -> None:
        self._write(block, f"{system}.failed", reason)

    def rounds(self, block: Block, system: str) -> dict[int, Round]:
        files = (self.folder / block.stem).glob(f"{system}-*.json")
        found = {}
        for file in files:
            number = file.stem.removeprefix(f"{system}-")
            if number.isdecimal():
                data = json.loads(file.read_text(encoding="utf-8"))
                found[int(number)] = Round(data["conditions"], tuple(Measured.of(rank) for rank in data["ranks"]))
        return dict(sorted(found.items()))

    def opening(self, block: Block, system: str) -> Opened:
        data = self._read(block, f"{system}.json")
        return Opened(data["first_step_s"], tuple(data["losses"]), data["notes"], data["predicted_ms"], data["plan"])

    def failure(self, block: Block, system: str) -> str:
        """Returns the reason why a system did not run, or "" if it ran or was not tried."""
        found: str = self._read(block, f"{system}.failed") or ""
        return found

    def reached(self, block: Block) -> dict[str, Any]:
        found: dict[str, Any] = self._read(block, "network.json")
        return found

    def timeline(self, block: Block) -> dict[str, Any]:
        """Returns figures of the timeline that embrace_fx recorded, or {} if it recorded none."""
        found: dict[str, Any] = self._read(block, "timeline.json") or {}
        return found

    def _turn_file(self, block: Block, system: str, round_: int) -> Path:
        return self.folder / block.stem / f"{system}-{round_}.json"

    def _write(self, block: Block, name: str, data: Any) -> None:
        folder = self.folder / block.stem
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, json.dumps(data))

    def _read(self, block: Block, name: str) -> Any:
        file = self.folder / block.stem / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def write_whole(file: Path, content: str) -> None:
    """Writes a file atomically: as a whole, or not at all."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.rename(file)
