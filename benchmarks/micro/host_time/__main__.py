"""What a step takes of processors, by thread, and what it calls, by room of the code and by op.

    python -m benchmarks.micro.host_time --output benchmarks/results                 # all models, 2 ranks
    python -m benchmarks.micro.host_time --models small lm --ranks 1 4 --rounds 5
    python -m benchmarks.micro.host_time --models bert --systems ddp embrace_eager  # the others beside the first
    python -m benchmarks.micro.host_time --models lm recommender --systems in_memory beyond_memory --rounds 7

Ranks are processes of this machine that meet on its loopback: what the host does for a step does not depend on a link's
rate. Each system has processes of its own, and systems take turns: a round is every system once. Times are medians of
rounds of what the kernel says that each thread has run (/proc); a ratio is of two systems of one round. Calls come from
processes that count in place of measuring; `--rounds 0` counts alone.
"small" has two tables of 50,000 x 32 under Adam, eight small layers and a batch of 16 x 20; its DDP has SparseAdam for
the tables. "tables-26" and its like have so many tables of 1,000 x 16, each of which a batch of 64 looks up once. They
and the lab's five models train under Adagrad; TorchRec runs where `make bench-peers` has made its environment.
"beyond_memory" has a tenth of each large table of the LM or the recommender in memory and its other rows in a file,
"in_memory" has all of them in memory: tables of up to 100,000 rows, under AdamW.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.micro.host_time.counters import Calls, count_ops, per_step, threads_now
from benchmarks.micro.host_time.systems import NAMES, steps_of, systems_of
from benchmarks.peers import SYSTEMS
from benchmarks.records import write_record

WARM_UP, MEASURED, COUNTED = 30, 30, 4
"""Steps: the least before anything is measured, measured, and counted. Models of many parameters are captured after
twelve steps, and launches are ordered anew twelve after a capture; a system that settles later warms up longer."""
PEER = Path(__file__).parents[3] / "build" / "peers" / "torchrec"
TIMEOUT_S = 900.0


def run_rank(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Measures times, or counts calls, on one rank."""
    torch.set_num_threads(1)
    calls = Calls()
    if job["what"] == "count":
        calls.install()
    dist.init_process_group("gloo", init_method=f"file://{job['store']}", rank=rank, world_size=job["ranks"])
    steps = steps_of(job["model"], job["system"], rank)
    late = SYSTEMS[job["system"]].warm_up_steps if job["system"] in SYSTEMS else 0
    _take(steps, max(WARM_UP, late))
    dist.barrier()
    if job["what"] == "time":
        before = threads_now()
        _take(steps, MEASURED)
        found: dict[str, Any] = {name: asdict(one) for name, one in per_step(before, threads_now(), MEASURED).items()}
        dist.barrier()
        return {"threads": found}
    calls.on = True
    _take(steps, COUNTED)
    calls.on = False
    calls.remove()
    dist.barrier()
    ops = count_ops(lambda: _take(steps, COUNTED), COUNTED)
    by_room = {room: count / COUNTED for room, count in calls.by_room.most_common()}
    return {"python_calls": by_room, "lock_calls": calls.locks / COUNTED, "ops": asdict(ops)}


def _take(steps: Iterator[Tensor], count: int) -> None:
    for _ in range(count):
        next(steps)


def measure(what: str, model: str, system: str, ranks: int) -> dict[str, Any]:
    """Runs the ranks of a system; returns what rank 0 found.

    Raises:
        RuntimeError: a rank has failed; with what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = {"what": what, "model": model, "system": system, "ranks": ranks, "store": f"{folder}/store"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "KINETO_LOG_LEVEL": "99"}
        command = [sys.executable, "-m", "benchmarks.micro.host_time", "--rank"]
        started = [
            subprocess.Popen(
                [*command, json.dumps({**job, "rank": rank})],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            outputs = [each.communicate(timeout=TIMEOUT_S) for each in started]
        finally:
            for each in started:
                each.kill()
    for each, (_, errors) in zip(started, outputs, strict=True):
        if each.returncode:
            ended = [rank.returncode for rank in started]
            raise RuntimeError(f"{system} failed to train {model}: ranks ended with {ended}:\n{errors}")
    line = next(line for line in outputs[0][0].splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def compare(model: str, ranks: int, rounds: int, asked: Sequence[str] = ()) -> dict[str, Any]:
    """Measures the systems of a model, all by default. Returns the processor time of each round, and one count of
    calls.
    """
    found = asked or systems_of(model)
    systems = [name for name in found if (PEER / ".ready").exists() or not name.startswith("torchrec")]
    times: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name in systems:
            times[name].append(measure("time", model, name, ranks)["threads"])
    print(f"\n{model}, {ranks} ranks: milliseconds of a processor per step of rank 0, medians of {rounds} rounds")
    totals = {name: [sum(one["cpu_ms"] for one in each.values()) for each in times[name]] for name in systems}
    counts = {name: measure("count", model, name, ranks) for name in systems}
    for name in systems:
        count = counts[name]
        print(
            f"{name:18} {_took(times[name], totals[name], totals[systems[0]], systems[0]) if rounds else ''}"
            f"Python calls {sum(count['python_calls'].values()):7.0f}, lock calls {count['lock_calls']:5.0f}, "
            f"ops {count['ops']['calls']:6.0f}, allocations {count['ops']['allocations']:5.0f}, "
            f"copied {count['ops']['copied_bytes'] / 2**20:7.2f} MiB"
        )
        _tell_parts(times[name], count)
    return {"model": model, "ranks": ranks, "times": times, "counts": counts}


def _took(rounds: list[dict[str, Any]], own_ms: list[float], others_ms: list[float], other: str) -> str:
    ratios = [own / of_other for own, of_other in zip(own_ms, others_ms, strict=True)]
    wakes = statistics.median(sum(one["waits"] for one in each.values()) for each in rounds)
    return (
        f"{statistics.median(own_ms):8.2f} ms, {statistics.median(ratios):5.2f} times {other}'s "
        f"({min(ratios):.2f} to {max(ratios):.2f}); wake-ups {wakes:5.0f}, "
    )


def _tell_parts(rounds: list[dict[str, Any]], count: dict[str, Any]) -> None:
    names = sorted({name for each in rounds for name in each})
    of_thread = {
        name: statistics.median(each.get(name, {"cpu_ms": 0.0})["cpu_ms"] for each in rounds) for name in names
    }
    shown = sorted(of_thread.items(), key=lambda item: -item[1])[:6]
    if rounds:
        print("    threads: " + ", ".join(f"{name} {cpu_ms:.2f} ms" for name, cpu_ms in shown))
    rooms = list(count["python_calls"].items())[:10]
    print("    Python calls: " + ", ".join(f"{room} {calls:.0f}" for room, calls in rooms))
    ops = list(count["ops"]["by_name"].items())[:10]
    print("    ops: " + ", ".join(f"{name.removeprefix('aten::')} {calls:.0f}" for name, calls in ops), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--systems",
        nargs="+",
        default=(),
        help="of the lab, embrace_eager, or beyond memory; those of a model here",
    )
    parser.add_argument("--output", type=Path, help="folder for the record; nothing is written by default")
    given = parser.parse_args()
    if given.rank is not None:
        job = json.loads(given.rank)
        sys.path.extend(map(str, PEER.glob("lib/*/site-packages")))
        print("RESULT " + json.dumps(run_rank(job, job["rank"])), flush=True)
        os._exit(0)  # threads of some systems would keep the process alive
    found = [compare(model, ranks, given.rounds, given.systems) for model in given.models for ranks in given.ranks]
    if given.output is not None:
        setting = {"torch": torch.__version__, "python": platform.python_version(), "load": os.getloadavg()}
        today = datetime.date.today().isoformat()
        print(write_record(given.output / f"host-time-{today}", {"setting": setting, "found": found}))


if __name__ == "__main__":
    main()
