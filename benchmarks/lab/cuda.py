"""Systems on emulated CUDA devices: torch's own runtime for CUDA, over stand-ins that take the time of a data sheet.

    .venv-device/bin/python -m benchmarks.lab device --cuda        (make device-env makes that environment)

Each system has processes of its own, a rank on a device each, one system after the other. What a device computes is not
computed (tests/support/emulated_cuda): losses mean nothing, and none is looked at. The host's part is real: Python, the
dispatcher, autograd, the allocator, ProcessGroupNCCL, and the stand-ins' own work for each launch.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lab.cuda_rank import AGREES, WARM_UP_SLOW
from benchmarks.lab.kept import write_whole
from benchmarks.lab.results import machine
from benchmarks.lab.rounds import Spread
from benchmarks.lab.settings import Setting
from benchmarks.records import write_record
from tests.support.emulated_cuda import Times, environment
from tests.support.emulated_cuda.build import build

STEPS = 4
"""Of a turn, after one that does not count."""


def measure(setting: Setting, device: str, say: Callable[[str], None], output: Path) -> Path:
    """Measures the models and systems of a setting, and reports those that fail. Returns the page, which is written
    after each model.

    Args:
        device: a name of `embrace_fx.cost.DEVICES`.
        output: the folder of the page.
    """
    (ranks,), (rate_mbit,) = setting.ranks, setting.rates_mbit
    times = Times(device, rate_mbit / 1e3, slow=WARM_UP_SLOW)
    found: dict[str, Any] = {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "configuration": asdict(setting),
        "machine": machine(),
        "times": asdict(times),
        "models": {},
    }
    libraries = build()
    for model in setting.models:
        found["models"][model] = of_model = {}
        for system in next(iter(setting.groups.values())):
            options = {"model": model, "system": system, "size": setting.size, "steps": STEPS}
            options |= {"rounds": setting.rounds, "slow": setting.slow}
            of_model[system] = _run(options, ranks, times, libraries, setting.timeout_s)
            say(f"{model}, {system}: {of_model[system].get('failed') or 'measured'}")
        page = write(found, output)
    return page


def _run(options: Mapping[str, Any], ranks: int, times: Times, libraries: Path, timeout_s: float) -> dict[str, Any]:
    """Returns the measurements of each rank, or the reason why one failed."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        findings = Path(folder) / "findings"
        variables = environment(libraries, findings, devices=1, times=times)
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
        variables |= {"EMBRACE_FX_CACHE": str(Path(folder) / "cache")}
        variables["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
        free.close()
        command = [sys.executable, "-m", "benchmarks.lab.cuda_rank", json.dumps(options)]
        processes = [
            subprocess.Popen(
                command,
                env=variables | {"RANK": str(rank), "LOCAL_RANK": "0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            ended = [process.communicate(timeout=timeout_s) for process in processes]
        except subprocess.TimeoutExpired:
            return {"failed": f"still busy after {timeout_s:g} s"}
        finally:
            for process in processes:
                process.kill()
        for process, (_, errors) in zip(processes, ended, strict=True):
            if process.returncode != 0:
                return {"failed": (errors.strip().splitlines() or ["nothing was said"])[-1][:300]}
        found = findings.read_text(encoding="utf-8") if findings.exists() else ""
    return {"ranks": [json.loads(output.splitlines()[-1]) for output, _ in ended], "findings": found}


def write(found: Mapping[str, Any], folder: Path) -> Path:
    """Writes page and JSON, without the name of a device, because none was used. Returns the page."""
    stem = f"lab-{found['configuration']['name']}-emulated-{found['date']}"
    write_record(folder / stem, found)
    page = folder / f"{stem}.md"
    write_whole(page, markdown(found))
    return page


def markdown(found: Mapping[str, Any]) -> str:
    setting, times = found["configuration"], found["times"]
    lines = [
        f"# Lab, *emulated CUDA*, {times['device']}, {found['date']}",
        "",
        f"{setting['ranks'][0]} ranks, an emulated {times['device']} each, {times['gigabits']:g} Gb/s between them, "
        f"{times['latency_us']:g} us a message, {times['kernel_us']:g} us a kernel; models at size "
        f"`{setting['size']}`, Adagrad; {found['machine']}. Perceived milliseconds, medians of {setting['rounds']} "
        f"turns of {STEPS} steps (smallest to largest); *k*: how many times longer device and links took, while the "
        "host did not. How to read this: "
        "README.md.",
    ]
    for model, systems in found["models"].items():
        lines += ["", f"## {model}", "", *_HEAD]
        measured = {system: of for system, of in systems.items() if "ranks" in of}
        lines += [_row(system, slow, of) for system, of in measured.items() for slow in _speeds(of)]
        lines += [f"\n{system} did not run: {of['failed']}" for system, of in systems.items() if "failed" in of]
        lines += ["", *_valid(measured)]
    return "\n".join(lines) + "\n"


_HEAD = (
    "| system | k | step ms | host ms of a step | processor ms | waits: streams, events, copies | waited ms "
    "| compute stands still | link busy | sent MB | launches |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


def _speeds(of: Mapping[str, Any]) -> list[float]:
    return list(dict.fromkeys(turn["slow"] for turn in of["ranks"][0]["turns"]))


def _turns(of: Mapping[str, Any], slow: float) -> list[list[Mapping[str, Any]]]:
    """Returns, for each round, the turns of all ranks."""
    rounds = zip(*(rank["turns"] for rank in of["ranks"]), strict=True)
    return [list(turns) for turns in rounds if turns[0]["slow"] == slow]


def _spread(turns: Sequence[Sequence[Mapping[str, Any]]], value: Callable[[Mapping[str, Any]], float]) -> Spread:
    """Returns the spread over rounds of the median over ranks."""
    found = Spread.of([median(value(each) for each in of_ranks) for of_ranks in turns])
    assert found is not None
    return found


def step_ms(of: Mapping[str, Any], slow: float) -> Spread:
    """Returns a system's step time as its slowed-down ranks perceive it."""
    return _spread(_turns(of, slow), lambda turn: turn["step_ms"] / slow)


def _row(system: str, slow: float, of: Mapping[str, Any]) -> str:
    turns = _turns(of, slow)

    def middle(name: str) -> float:
        return _spread(turns, lambda turn: turn[name]).median

    def waits_for(kind: int) -> float:
        return _spread(turns, lambda turn: float(turn["waits"][kind])).median

    waits = ", ".join(f"{waits_for(kind):.3g}" for kind in range(3))
    return (
        f"| {system} | {slow:g} | {step_ms(of, slow).text(1)} | {middle('host_ms'):.1f} "
        f"| {middle('issuing_ms'):.1f} | {waits} "
        f"| {middle('waited_ms') / slow:.1f} | {1 - middle('busy_ms') / middle('step_ms'):.0%} "
        f"| {middle('link_ms') / middle('step_ms'):.0%} | {middle('sent_bytes') / 1e6:,.2f} "
        f"| {middle('enqueued'):,.0f} |"
    )


def _valid(systems: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Of each system the last two speeds compared; `embrace_2d` beside the others, each at its last one."""
    lines, last = [], {}
    for name, of in systems.items():
        speeds = _speeds(of)[-2:]
        steps = [step_ms(of, slow).median for slow in speeds]
        last[name] = steps[-1]
        if len(steps) == 2:
            differ = abs(steps[0] / steps[1] - 1)
            says = "the device's time" if differ < AGREES else "the host still counts"
            lines.append(f"- `{name}`: k = {speeds[0]:g} and {speeds[1]:g} differ by {differ:.1%}: {says}.")
    if own := last.pop("embrace_2d", None):
        others = [f"{name} {ms / own:.2f}" for name, ms in last.items()]
        lines.append(f"- Over `embrace_2d`, each at its last k: {', '.join(others)}.")
    return lines
