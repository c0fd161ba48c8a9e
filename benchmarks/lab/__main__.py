"""The lab: systems that train the same models, ranks on hosts of limited bandwidth, in turns within one run.

    python -m benchmarks.lab quick      4 ranks, two models, minutes
    python -m benchmarks.lab full       8, 4 and 2 ranks, two rates, all models and systems; up to two hours
    python -m benchmarks.lab full --models lm --ranks 8 --rates-mbit 200 --minutes 8
    python -m benchmarks.lab device     8, 16, 4 and 2 ranks with an emulated device each, in slow motion; hours
    python -m benchmarks.lab device --quick        4 ranks, one model, minutes
    python -m benchmarks.lab device --cuda         2 ranks on emulated CUDA devices; .venv-device runs it, half an hour
    python -m benchmarks.lab profile    records what the emulated device's blocks take, on one core
    python -m benchmarks.lab full --minutes 0      measures nothing, writes what is kept

A block is one model on one network, under one group of systems. All of these are opened and warmed up, then take turns;
a round is every system once. What is measured is kept under build/lab and not measured again, until the sources, the
versions or the setting change: a run that was interrupted, or whose minutes were over, goes on where it was. Either way
results are written, and say if they are partial. Hosts and ranks end with this process, however it ends.
benchmarks/results/README.md says how to read results.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.device import profile
from benchmarks.lab import cuda
from benchmarks.lab.block import BlockRun
from benchmarks.lab.hosts import ROOT, Crew, CrewFailed, crew
from benchmarks.lab.kept import Kept, fingerprint
from benchmarks.lab.report import write
from benchmarks.lab.results import results
from benchmarks.lab.settings import CHOSEN, SETTINGS, Block, Setting
from benchmarks.models import MODELS
from benchmarks.network import Network, network
from benchmarks.peers import SYSTEMS
from embrace_fx.cost.devices import DEVICES

PROFILE = "profile"
"""In a setting's place: records what the blocks of all models take on one core (benchmarks/device/profiles.json)."""
KEPT = ROOT / "build" / "lab"
RESULTS = Path(__file__).parents[1] / "results"


@dataclass
class Lab:
    """One run of the lab. Measures what is missing of a setting, stores it in `kept`, and starts nothing after
    `deadline` (a time of `time.monotonic`).
    """

    setting: Setting
    kept: Kept
    console: Console
    logs: Path
    deadline: float = float("inf")
    _run_id: str = field(default_factory=lambda: datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"))

    def run(self) -> None:
        """Measures block by block, in the order of the setting. Blocks with the same network follow each other."""
        blocks = list(self.setting.blocks())
        missing = {block: self._missing(block) for block in blocks}
        with _progress(self.console) as progress:
            total = sum(self.setting.rounds_of(block) * len(self.setting.systems(block)) for block in blocks)
            task = progress.add_task("", total=total, completed=total - sum(map(len, missing.values())))
            for links, of_links in groupby((b for b in blocks if missing[b]), lambda b: b.links):
                if self._is_over():
                    break
                with contextlib.ExitStack() as stack:
                    hosts = stack.enter_context(network(links))
                    crews: dict[str, Crew] = {}
                    for block in of_links:
                        if not self._is_over():
                            self.kept.network(block, hosts.reached)
                            self._start_crews(block, missing[block], hosts, crews, stack)
                            self._measure(block, missing[block], crews, hosts, progress, task)

    def _is_over(self) -> bool:
        return time.monotonic() >= self.deadline

    def _measure(
        self,
        block: Block,
        missing: list[tuple[int, str]],
        crews: dict[str, Crew],
        hosts: Network,
        progress: Progress,
        task: TaskID,
    ) -> None:
        BlockRun(
            self.setting,
            block,
            self.kept,
            crews,
            self._run_id,
            describe=lambda text: progress.update(task, description=text),
            advance=lambda: progress.advance(task),
            say=lambda text: self.console.print(text, markup=False, highlight=False),
            fail=partial(self._failed, block),
            unlimited=hosts.unlimited,
        ).measure([(round_, s) for round_, s in missing if SYSTEMS[s].environment in crews], self.deadline)

    def _missing(self, block: Block) -> list[tuple[int, str]]:
        """Returns (round, system) of all missing measurements of a block, in the order of their turns."""
        systems = self.setting.systems(block)
        return [(r, s) for r in range(self.setting.rounds_of(block)) for s in systems if not self.kept.has(block, s, r)]

    def _start_crews(
        self,
        block: Block,
        missing: list[tuple[int, str]],
        hosts: Network,
        crews: dict[str, Crew],
        stack: contextlib.ExitStack,
    ) -> None:
        """Starts the ranks of each environment. If an environment does not start, marks its systems as failed."""
        systems = dict.fromkeys(system for _, system in missing)
        for environment in dict.fromkeys(SYSTEMS[system].environment for system in systems):
            if environment in crews:
                continue
            self.console.print(f"starting {block.ranks} ranks of {environment}")
            try:
                crews[environment] = stack.enter_context(crew(hosts, block.ranks, environment, self.logs))
            except CrewFailed as error:
                for system in systems:
                    if SYSTEMS[system].environment == environment:
                        self._failed(block, system, str(error), "")

    def _failed(self, block: Block, system: str, reason: str, details: str) -> None:
        first = reason.strip().splitlines()[0][:300]
        self.kept.failed(block, system, first)
        self.console.print(f"{block.title}: {system} did not run: {first}", style="red", markup=False)
        if details:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.logs / f"failed-{block.stem}-{system}.txt").write_text(details, encoding="utf-8")


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:52}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Ends a run at SIGTERM or SIGHUP (a closed terminal) as at Ctrl-C, so that the measurements are written."""
    raise KeyboardInterrupt


def chosen(options: argparse.Namespace) -> Setting:
    """Returns the requested setting. Groups and systems that the options name are measured for all of its ranks and
    rates.

    Raises:
        ValueError: a model or system does not exist.
    """
    if options.setting not in SETTINGS:
        raise ValueError(f"unknown setting {options.setting}. Choose from {', '.join(SETTINGS)}.")
    setting = SETTINGS[options.setting]
    asked = (("model", "models", MODELS), ("group", "groups", setting.groups), ("system", "systems", SYSTEMS))
    for kind, option, known in asked:
        unknown = [name for name in getattr(options, option) or () if name not in known]
        if unknown:
            raise ValueError(f"unknown {kind} {', '.join(unknown)}. Choose from {', '.join(known)}.")
    groups = {name: setting.groups[name] for name in options.groups or setting.groups}
    if options.systems:
        groups = {CHOSEN: options.systems}
    given = ("models", "rounds", "ranks", "rates_mbit", "slow", "ratios", "turn_ms", "size", "optimizer", "timeout_s")
    changes = {name: getattr(options, name) for name in given if getattr(options, name) is not None}
    if "slow" in changes and not setting.slow:
        raise ValueError(f"slow motion needs a setting with emulated devices, which {setting.name} is not.")
    if "rounds" in changes:
        changes["rounds_besides"] = 0
    if "slow" in changes:
        changes["slower"] = ()
    if "rates_mbit" in changes:
        changes.setdefault("ratios", ())
    if options.groups or options.systems:
        changes |= {"elsewhere": tuple(groups), "scaling": (), "not_first": ()}
    if {"elsewhere", "ranks", "rates_mbit", "slow", "ratios"} & {*changes}:
        changes["extra"] = ()
    return replace(setting, groups=groups, **changes)


def whole(setting: Setting, base: Setting) -> Setting:
    """Returns everything that the pages of `base` may show, measured as `setting` says, including what other runs have
    measured.
    """
    return replace(
        setting,
        models=tuple(dict.fromkeys((*base.models, *setting.models))),
        groups={**base.groups, **setting.groups},
        ranks=tuple(dict.fromkeys((*base.ranks, *setting.ranks))),
        rates_mbit=tuple(dict.fromkeys((*base.rates_mbit, *setting.rates_mbit))),
        slow=tuple(dict.fromkeys((*base.slow, *setting.slow))),
        ratios=tuple(dict.fromkeys((*base.ratios, *setting.ratios))),
        elsewhere=tuple(dict.fromkeys((*base.elsewhere, *(group for group in setting.groups if group == CHOSEN)))),
        scaling=base.scaling,
        not_first=tuple(group for group in base.not_first if group in setting.not_first),
        extra=base.extra,
    )


def several(kind: type[int] | type[float] | type[str]) -> Callable[[str], tuple[int | float | str, ...]]:
    return lambda text: tuple(kind(each) for each in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=(*SETTINGS, PROFILE))
    parser.add_argument("--quick", action="store_true", help="the short form of `device`")
    parser.add_argument("--cuda", action="store_true", help="`device` under torch's runtime for CUDA, emulated")
    parser.add_argument("--device", choices=tuple(DEVICES), default="H100", help="of --cuda: whose data sheet")
    parser.add_argument("--models", type=several(str), help=f"of {', '.join(MODELS)}; separated by commas")
    parser.add_argument("--groups", type=several(str), help="of the setting's groups of systems")
    parser.add_argument("--systems", type=several(str), help=f"a group of its own, of {', '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--ranks", type=several(int), help="numbers of ranks, separated by commas")
    parser.add_argument("--rates-mbit", type=several(float), help="what a rank can send; separated by commas")
    parser.add_argument(
        "--slow", type=several(float), help="of emulated devices: how many times slower; separated by commas"
    )
    parser.add_argument("--ratios", type=several(float), help="of emulated devices: rates by wire over compute")
    parser.add_argument("--turn-ms", type=float, help="about how long the steps of a turn are that count")
    parser.add_argument("--size", choices=("paper", "lab", "tiny"))
    parser.add_argument("--optimizer", choices=("adagrad", "sgd"))
    parser.add_argument("--timeout-s", type=float, help="of opening a system, and of a turn")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="begin nothing after this time, but for a first round of what has been opened",
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.setting == PROFILE:
        profile.record()
        return
    options.setting += "-cuda" if options.cuda else "-quick" if options.quick else ""
    try:
        setting = chosen(options)
    except ValueError as error:
        parser.error(str(error))
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if ending != signal.SIGHUP or signal.getsignal(ending) != signal.SIG_IGN:  # keep SIGHUP ignored, as under nohup
            signal.signal(ending, _interrupt)
    console = Console()
    if options.cuda:
        page = cuda.measure(setting, options.device, console.print, options.output)
        console.print(page.read_text(encoding="utf-8"), markup=False, soft_wrap=True)
        return
    kept = Kept(KEPT / fingerprint(setting))
    interrupted = False
    try:
        Lab(setting, kept, console, KEPT / "logs", time.monotonic() + options.minutes * 60).run()
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: what was measured is kept, the same command goes on")
    found = results(whole(setting, SETTINGS[options.setting]), kept, setting)
    if found["blocks"]:
        page = write(found, options.output)
        console.print(page.read_text(encoding="utf-8"), markup=False, soft_wrap=True)
        console.print(f"written to {page.parent}, {page.stem}*", markup=False)
    sys.exit(130 if interrupted else 0 if found["blocks"] else 1)


if __name__ == "__main__":
    main()
