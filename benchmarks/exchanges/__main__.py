"""The sparse exchanges beside the dense AllReduce, on links of limited bandwidth, over densities.

    python -m benchmarks.exchanges --output benchmarks/results
    python -m benchmarks.exchanges --cases "blocks 0.01,zipf 0.0113" --systems allreduce,zen_balanced --rounds 5

8 ranks, each on a host of its own (`benchmarks/network.py`), exchange gradients of 100 MiB in place, as training does.
A round is every system once on every case, in an order that changes from round to round; cases of high density, whose
exchanges take seconds, have a single round. What is measured is kept
under build/exchanges and not measured again until the sources, the versions or the setting change; with --minutes a
run stops there, and the same command goes on. benchmarks/results/README.md says how to read the results.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.exchanges.cases import CASES, SYSTEMS
from benchmarks.exchanges.report import markdown, summarise, svg
from benchmarks.namespaces import CONGESTION_CONTROL
from benchmarks.network import Links, network
from benchmarks.records import write_record

REPEATED_DENSITY = 0.1
"""Above it, a case has one round."""
ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "exchanges"
MEASURED_SOURCES = (
    "runtime/exchanges/*.py", "runtime/ranks/communicator.py", "runtime/probe/probe.py", "runtime/probe/handling.py",
    "embrace_fx/cost/exchanges.py", "embrace_fx/cost/sparsity.py", "embrace_fx/cost/links.py", "benchmarks/network.py",
    "benchmarks/exchanges/cases.py", "benchmarks/exchanges/rank.py",
)  # fmt: skip
"""What a measurement depends on, besides the setting and the versions."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="a power of two")
    parser.add_argument("--rate-mbit", type=float, default=300.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", default=",".join(case.name for case in CASES), help="separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="separated by commas")
    parser.add_argument("--divisor", type=int, default=1, help="makes tensors so many times smaller")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="begin no cell after this time; 0: write what is kept"
    )
    parser.add_argument("--output", type=Path, help="a folder for JSON, page and picture")
    parser.add_argument("--kept", type=Path, default=KEPT, help="folder of what is measured")
    options = parser.parse_args()
    wanted = cells(options)
    setting = {"ranks": options.ranks, "rate_mbit": options.rate_mbit, "divisor": options.divisor}
    options.kept.mkdir(parents=True, exist_ok=True)
    kept = options.kept / f"{fingerprint(setting)}.jsonl"
    before = read(kept)
    missing = [cell for cell in wanted if cell not in before["cells"]]
    if missing and options.minutes > 0:
        with network(Links(options.ranks, options.rate_mbit)) as hosts, tempfile.TemporaryDirectory() as folder:
            job = Path(folder) / "job.json"
            given = {"cells": missing, "kept": str(kept), "minutes": options.minutes, "divisor": options.divisor}
            job.write_text(json.dumps({**given, "cluster": before["cluster"]}))
            command = [sys.executable, "-m", "benchmarks.exchanges.rank", str(job)]
            limit_s = options.minutes * 60 + 300
            _append(kept, {"network": asdict(hosts.reached)})
            hosts.run(command, timeout_s=limit_s, environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    found = read(kept)
    measured = {cell: found["cells"][cell] for cell in wanted if cell in found["cells"]}
    if not measured:
        sys.exit("nothing was measured: give it more --minutes")
    configuration = {
        "command": " ".join(["python -m benchmarks.exchanges", *_quoted(sys.argv[1:])]),
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "complete": len(measured) == len(wanted),
        **setting,
        "network": found["network"],
        "cluster": found["cluster"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "congestion_control": CONGESTION_CONTROL,
    }
    rows = summarise(measured, configuration)
    page = markdown(rows, configuration)
    print(page)
    if options.output:
        write(options.output, measured, rows, configuration)


def cells(options: argparse.Namespace) -> list[tuple[int, str, str]]:
    """Returns (round, case, system) of all requested measurements, in the order in which they are run."""
    names = {"case": options.cases.split(","), "system": options.systems.split(",")}
    for kind, known in (("case", [case.name for case in CASES]), ("system", list(SYSTEMS))):
        if unknown := [name for name in names[kind] if name not in known]:
            sys.exit(f"unknown {kind} {', '.join(unknown)}. Choose from {', '.join(known)}")
    systems = names["system"]
    return [
        (round_, case, system)
        for round_ in range(options.rounds)
        for case in names["case"]
        if round_ == 0 or float(case.split()[1]) <= REPEATED_DENSITY
        for system in systems[round_ % len(systems) :] + systems[: round_ % len(systems)]
    ]


def fingerprint(setting: dict[str, Any]) -> str:
    """Returns a hash that changes with everything on which a measurement depends."""
    files = sorted(file for pattern in MEASURED_SOURCES for file in ROOT.glob(pattern))
    parts = [json.dumps(setting), torch.__version__, platform.python_version()]
    parts += [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def read(kept: Path) -> dict[str, Any]:
    """Reads what has been measured: cells by round, case and system, the first probe of the links, and the last
    network.
    """
    found: dict[str, Any] = {"cells": {}, "cluster": None, "network": None}
    for line in kept.read_text().splitlines() if kept.exists() else ():
        data = json.loads(line)
        if "case" in data:
            found["cells"][data["round"], data["case"], data["system"]] = data
        else:
            found |= data
    return found


def write(folder: Path, measured: Any, rows: Any, configuration: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"exchanges-{configuration['date']}"
    data = {"configuration": configuration, "rows": [asdict(row) for row in rows], "cells": list(measured.values())}
    write_record(folder / stem, data)
    (folder / f"{stem}.md").write_text(markdown(rows, configuration, f"{stem}.svg"))
    (folder / f"{stem}.svg").write_text(svg(rows, configuration))


def _append(kept: Path, line: dict[str, Any]) -> None:
    with kept.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _quoted(words: list[str]) -> list[str]:
    return [f'"{word}"' if " " in word else word for word in words]


if __name__ == "__main__":
    main()
