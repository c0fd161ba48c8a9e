"""Runs the sections of `benchmarks.gpu`, each in a process of its own, and writes what they found."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import environment, fabric, kernels, parity, report, sharing, steps, trace
from benchmarks.gpu.device import open_device
from benchmarks.gpu.section import DRY, Context, Sizes

WHOLE_S = 525.0
"""Of nine minutes, what sections may take; the rest writes the results."""

SECTIONS: Mapping[str, tuple[Callable[[Context], None], float]] = {
    "environment": (environment.run, 40.0),
    "kernels": (kernels.run, 80.0),
    "parity": (parity.run, 80.0),
    "fabric": (fabric.run, 160.0),
    "steps": (steps.run, 160.0),
    "sharing": (sharing.run, 70.0),
    "trace": (trace.run, 60.0),
}
"""Section -> what runs, and its limit in seconds. The sum is above the whole: few sections take all of theirs."""

KILLED_AFTER_S = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="See benchmarks/gpu/__init__.py.")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, tiny sizes: shows that the code runs")
    parser.add_argument("--output", type=Path, help="folder of the results; default benchmarks/results, or a new one")
    parser.add_argument("--only", help="sections, by commas")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        run_section(options.section, options.output, options.seconds, options.dry_run)
        return
    open_device(options.dry_run)  # fails at once if something is missing
    output = options.output or _default_output(options.dry_run)
    failed = run_all(options.only.split(",") if options.only else list(SECTIONS), output, options.dry_run)
    sys.exit(1 if failed else 0)


def _default_output(dry_run: bool) -> Path:
    return Path(tempfile.mkdtemp(prefix="gpu-dry-run-")) if dry_run else Path("benchmarks/results")


def run_all(names: list[str], output: Path, dry_run: bool) -> list[str]:
    """Runs sections and writes their results; returns those that failed."""
    started = time.monotonic()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    stem = f"gpu-{'dry-run-' if dry_run else ''}{today}"
    directory = output / stem
    directory.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"date": today, "dry_run": dry_run, "command": " ".join(sys.argv[1:]), "sections": {}}
    for name in names:
        limit = min(SECTIONS[name][1], WHOLE_S - (time.monotonic() - started))
        results["sections"][name] = _run_apart(name, directory, limit, dry_run)
        results["seconds"] = time.monotonic() - started
        report.write(results, output, stem)  # written after each section, in case a later one fails
        print(f"{name}: {results['sections'][name]['outcome']}", flush=True)
    print(f"{output / stem}.md")
    return [name for name, found in results["sections"].items() if found["outcome"] != "done"]


def _run_apart(name: str, directory: Path, limit_s: float, dry_run: bool) -> dict[str, Any]:
    """Runs one section in its own process. At its time limit, kills the process and its children."""
    if limit_s <= 0:
        return {"outcome": "no time left", "seconds": 0.0, "rows": [], "error": None}
    command = [sys.executable, "-m", "benchmarks.gpu", "--section", name, "--output", str(directory)]
    command += ["--seconds", str(limit_s), *(["--dry-run"] if dry_run else [])]
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        outcome = "done"
        try:
            if process.wait(limit_s) != 0:
                outcome = "failed"
        except subprocess.TimeoutExpired:
            outcome = f"cut off after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also kills its child processes
            process.wait(KILLED_AFTER_S)
        log.seek(0)
        text = log.read()
    found = _found(directory, name)
    rows = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    found.unlink(missing_ok=True)
    seconds = time.monotonic() - started
    return {"outcome": outcome, "seconds": seconds, "rows": rows, "error": None if outcome == "done" else text[-4000:]}


def _found(directory: Path, name: str) -> Path:
    return directory / f"{name}.jsonl"


def run_section(name: str, directory: Path, seconds: float, dry_run: bool) -> None:
    """Runs a section in its own process."""
    found = _found(directory, name)
    found.unlink(missing_ok=True)
    sizes = DRY if dry_run else Sizes()
    context = Context(open_device(dry_run), sizes, found, directory, seconds)
    try:
        SECTIONS[name][0](context)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # exits even if the CUDA context is broken or a thread still waits
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
