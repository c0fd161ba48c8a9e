"""The lab: systems that train the same models, ranks on hosts of limited bandwidth, in turns within one run.

    python -m benchmarks.lab quick      4 ranks, two models, minutes
    python -m benchmarks.lab full       8 ranks, all models and systems; up to two hours
    python -m benchmarks.lab full --models lm --systems ddp_sparse,embrace_2d --rounds 9

A round is every system once; each cell runs in fresh processes, which `benchmarks/lab_rank.py` forks. What is measured
is kept under build/lab and not measured again, until the sources, the versions or the setting change: a run that was
interrupted, or whose minutes were over, goes on where it was. Either way results are written, and say if they are
partial. Hosts and ranks end with this process, however it ends. benchmarks/results/README.md says how to read results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.lab_cell import Cell, Failed, Measured
from benchmarks.lab_floors import floor
from benchmarks.lab_hosts import ROOT, Crew, CrewFailed, crew
from benchmarks.lab_report import ALONE, as_data, markdown, step_ms, summarize, svg
from benchmarks.models import MODELS
from benchmarks.models.base import on_meta, sizes
from benchmarks.network import Links, Network, Reached, network
from benchmarks.peers import SYSTEMS

KEPT = ROOT / "build" / "lab"
RESULTS = Path(__file__).parent / "results"
MEASURED_SOURCES = (
    "embrace_fx/**/*.py", "passes/*.py", "runtime/*.py", "benchmarks/models/*.py", "benchmarks/peers/*.py",
    "benchmarks/network.py", "benchmarks/lab_cell.py", "benchmarks/lab_rank.py",
)  # fmt: skip
"""What a measurement depends on, besides the setting and the versions."""


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        name: of the results' files.
        matrix: model -> its systems, in the order of their turns.
        rounds: at least 5 for results worth quoting.
        rate_mbit: what each rank can send, and receive.
        warm_up_steps, steps: of a cell.
    """

    name: str
    matrix: dict[str, tuple[str, ...]]
    rounds: int
    ranks: int
    rate_mbit: float
    warm_up_steps: int
    steps: int
    size: str = "lab"
    optimizer: str = "adagrad"
    learning_rate: float = 0.001
    seed: int = 0
    timeout_s: float = 600.0

    def cells(self) -> Iterator[tuple[int, str, str]]:
        """Round, model and system of every cell; all models' first round comes before any second one."""
        for round_ in range(self.rounds):
            for model, systems in self.matrix.items():
                for system in systems:
                    yield round_, model, system

    def cell(self, model: str, system: str, port: int) -> Cell:
        return Cell(
            model,
            self.size,
            system,
            self.optimizer,
            self.learning_rate,
            self.seed,
            self.rate_mbit,
            self.warm_up_steps,
            self.steps,
            port,
            self.timeout_s,
        )

    def environments(self) -> list[str]:
        return sorted({SYSTEMS[system].environment for systems in self.matrix.values() for system in systems})


_EMBRACE = ("embrace_none", "embrace_horizontal", "embrace_vertical", "embrace_2d")
_DDP = ("alone_dense", "alone_sparse", "ddp", "ddp_sparse")
_TORCHREC = ("torchrec_column", "torchrec_row", "torchrec_planner")

SETTINGS = {
    "quick": Setting(
        "quick",
        {
            "lm": ("alone_sparse", "ddp_sparse", "embrace_none", "embrace_2d"),
            "gnmt": ("alone_sparse", "ddp_sparse", "embrace_2d"),
        },
        rounds=5,
        ranks=4,
        rate_mbit=200.0,
        warm_up_steps=2,
        steps=2,
    ),
    # Not every pair: what says little is left out for time. torch.compile leaves LSTMs alone; where tables are a small
    # part, how TorchRec cuts them hardly matters; Horovod's dense gradients travel as DDP's.
    "full": Setting(
        "full",
        {
            "lm": (*_DDP, "horovod_sparse", "torchrec_column", "torchrec_planner", *_EMBRACE),
            "gnmt": (*_DDP, "horovod_sparse", "torchrec_column", *_EMBRACE),
            "transformer": (*_DDP, "ddp_compiled", "horovod", "torchrec_column", *_EMBRACE),
            "bert": (*_DDP, "ddp_compiled", "torchrec_column", "embrace_none", "embrace_2d"),
            "recommender": (*_DDP, "horovod_sparse", *_TORCHREC, *_EMBRACE),
        },
        rounds=5,
        ranks=8,
        rate_mbit=200.0,
        warm_up_steps=2,
        steps=2,
    ),
}


@dataclass
class Lab:
    """One run: which cells are there, when and under which load they began, and what went wrong.

    `kept` is the folder of measurements and logs.
    """

    setting: Setting
    console: Console
    kept: Path = KEPT
    cells: dict[tuple[int, str, str], tuple[Measured, ...]] = field(default_factory=dict)
    conditions: dict[tuple[int, str, str], dict[str, Any]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    reached: Reached | None = None
    crews: dict[str, Crew] = field(default_factory=dict)

    def run(self, deadline: float) -> None:
        """Measures what is missing until `deadline` (time.monotonic), or Ctrl-C."""
        setting = self.setting
        with contextlib.ExitStack() as stack:
            hosts = stack.enter_context(network(Links(setting.ranks, setting.rate_mbit)))
            self.reached = hosts.reached
            self._start_crews(hosts, stack)
            folder = self.kept / self._fingerprint()
            folder.mkdir(parents=True, exist_ok=True)
            progress = stack.enter_context(_progress(self.console))
            task = progress.add_task("", total=len(list(setting.cells())))
            for cell in setting.cells():
                round_, model, system = cell
                progress.update(task, description=f"round {round_ + 1} {model} {system}")
                file = folder / f"{model}-{system}-{round_}.json"
                if file.exists():
                    data = json.loads(file.read_text())
                    self.cells[cell] = tuple(Measured.of(rank) for rank in data["ranks"])
                    self.conditions[cell] = data["conditions"]
                elif time.monotonic() < deadline:
                    self._measure(cell, file)
                progress.advance(task)

    def _start_crews(self, hosts: Network, stack: contextlib.ExitStack) -> None:
        """Systems of an environment that does not start have failed."""
        for environment in self.setting.environments():
            self.console.print(f"starting {self.setting.ranks} ranks of {environment}")
            try:
                self.crews[environment] = stack.enter_context(
                    crew(hosts, self.setting.ranks, environment, self.kept / "logs")
                )
                self.versions[environment] = self.crews[environment].versions
            except CrewFailed as error:
                self._environment_failed(environment, str(error))

    def _measure(self, cell: tuple[int, str, str], file: Path) -> None:
        round_, model, system = cell
        if (model, system) in self.failures:
            return
        environment = SYSTEMS[system].environment
        now = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
        conditions = {"began": now, "load": os.getloadavg()[0]}
        try:
            found = self.crews[environment].run(self.setting.cell(model, system, _free_port()))
        except CrewFailed as error:
            del self.crews[environment]
            self._environment_failed(environment, f"during {model} {system}: {error}")
            return
        if isinstance(found, Failed):
            self._failed(model, system, found.reason, found.details)
            return
        self.cells[cell] = found
        self.conditions[cell] = conditions
        _write(file, json.dumps({"conditions": conditions, "ranks": [asdict(rank) for rank in found]}))
        self.console.print(f"round {round_ + 1}  {model:12} {system:20} {step_ms(found):9,.0f} ms per step")

    def _environment_failed(self, environment: str, reason: str) -> None:
        for model, systems in self.setting.matrix.items():
            for system in systems:
                if SYSTEMS[system].environment == environment and (model, system) not in self.failures:
                    self._failed(model, system, reason, "")

    def _failed(self, model: str, system: str, reason: str, details: str) -> None:
        first = reason.strip().splitlines()[0][:300]
        self.failures[model, system] = first
        self.console.print(f"{model} {system} did not run: {first}", style="red", markup=False)
        if details:
            _write(self.kept / "logs" / f"failed-{model}-{system}.txt", details)

    def _fingerprint(self) -> str:
        """Changes with whatever a measurement depends on."""
        setting = {k: v for k, v in asdict(self.setting).items() if k not in ("name", "matrix", "rounds")}
        assert self.reached is not None
        parts = [json.dumps(setting, sort_keys=True), json.dumps(self.versions, sort_keys=True), self.reached.reason]
        files = sorted(file for pattern in MEASURED_SOURCES for file in ROOT.glob(pattern))
        parts += [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def results(self) -> dict[str, Any]:
        """All that is known, for the JSON file and the page."""
        assert self.reached is not None
        return {
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "complete": set(self.setting.cells()) == set(self.cells),
            "configuration": asdict(self.setting),
            "network": asdict(self.reached),
            "machine": _machine(),
            "versions": self.versions,
            "models": {model: self._of_model(model) for model in self.setting.matrix if self._rounds(model)},
        }

    def _rounds(self, model: str) -> dict[str, dict[int, tuple[Measured, ...]]]:
        found: dict[str, dict[int, tuple[Measured, ...]]] = {}
        for system in self.setting.matrix[model]:
            rounds = {r: ranks for (r, m, s), ranks in sorted(self.cells.items()) if (m, s) == (model, system)}
            if rounds:
                found[system] = rounds
        return found

    def _of_model(self, model: str) -> dict[str, Any]:
        setting, reached, rounds = self.setting, self.reached, self._rounds(model)
        assert reached is not None
        workload = MODELS[model][setting.size]
        measured_steps = range(setting.warm_up_steps, setting.warm_up_steps + setting.steps)
        cheapest = floor(workload, setting.ranks, measured_steps, setting.seed)
        reference = list(rounds)[-1]
        rows = summarize(rounds, reference, reached.shaped)
        compute_ms = next((row.step_ms.median for row in rows if row.system == ALONE), None)
        wire_ms = cheapest.time_ms(max(reached.transfer_mbit))
        return {
            "sizes": asdict(sizes(on_meta(workload))),
            "floor": {**asdict(cheapest), "wire_ms": wire_ms, "compute_ms": compute_ms},
            "reference": reference,
            "rows": rows,
            "rounds": {
                system: {
                    r: {**self.conditions[r, model, system], "ranks": [asdict(rank) for rank in ranks]}
                    for r, ranks in of_system.items()
                }
                for system, of_system in rounds.items()
            },
            "failures": {s: reason for (m, s), reason in self.failures.items() if m == model},
        }


def write(results: dict[str, Any], folder: Path) -> Path:
    """Writes JSON, page and pictures, all named by setting and date; returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"lab-{results['configuration']['name']}-{results['date']}"
    plots = {}
    for model, found in results["models"].items():
        plots[model] = f"{stem}-{model}.svg"
        _write(folder / plots[model], svg(model, found, f"{model}, {results['configuration']['ranks']} ranks"))
    _write(folder / f"{stem}.json", json.dumps(as_data(results), indent=1) + "\n")
    page = folder / f"{stem}.md"
    _write(page, markdown(results, plots))
    return page


def _write(file: Path, content: str) -> None:
    """Whole or not at all."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.rename(file)


def _free_port() -> int:
    """Free on this machine's loopback; hosts of their own have next to no ports in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _machine() -> str:
    models = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({models[0] if models else platform.machine()}), {memory:.0f} GiB"


def _cpu_lines() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:42}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def chosen(options: argparse.Namespace) -> Setting:
    """The setting that the command line asks for."""
    setting = SETTINGS[options.setting]
    models = options.models.split(",") if options.models else list(setting.matrix)
    systems = options.systems.split(",") if options.systems else []
    for kind, names, known in (("model", models, MODELS), ("system", systems, SYSTEMS)):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"expected a {kind} of {', '.join(known)}, in the options, found {', '.join(unknown)}.")
    matrix = {model: tuple(systems) or setting.matrix.get(model, SETTINGS["full"].matrix[model]) for model in models}
    given = ("rounds", "ranks", "rate_mbit", "warm_up_steps", "steps", "size", "optimizer", "timeout_s")
    changes = {name: getattr(options, name) for name in given if getattr(options, name) is not None}
    return replace(setting, matrix=matrix, **changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}; separated by commas")
    parser.add_argument("--systems", help=f"of {', '.join(SYSTEMS)}; separated by commas, in the order of their turns")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--rate-mbit", type=float)
    parser.add_argument("--warm-up-steps", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--size", choices=("lab", "tiny"))
    parser.add_argument("--optimizer", choices=("adagrad", "sgd"))
    parser.add_argument("--timeout-s", type=float, help="of one cell")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after this time")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    try:
        setting = chosen(options)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, _interrupt)
    console = Console()
    lab = Lab(setting, console)
    interrupted = False
    try:
        lab.run(time.monotonic() + options.minutes * 60)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: what was measured is kept, the same command goes on")
    if lab.cells:
        page = write(lab.results(), options.output)
        console.print(page.read_text(encoding="utf-8"), markup=False, soft_wrap=True)
        console.print(f"written to {page.parent}, {page.stem}*", markup=False)
    sys.exit(130 if interrupted else 0 if lab.cells else 1)


if __name__ == "__main__":
    main()
