"""Random faults, one after another: `python -m tests.soak.faults --count 200`, each in ranks of its own.

Each is drawn from its seed: a model in training, and a rank that is killed, stopped or raises at a random moment. What
must come of it: every other rank ends within 15 seconds in an error that names that rank. `--seed SEED --count 1`
repeats one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch.distributed as dist

import embrace_fx
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.vocabulary.schedule import SCHEDULES, ScheduleName
from tests.support.failing import draw_batch, make_model
from tests.support.ranks import fresh_ranks
from tests.support.training import OPTIMIZERS, make_optimizers

KINDS = ("killed", "killed while it sets up", "stopped", "raises")

STEPS = 14
WITHIN_S = 15.0
STOPPED_S = 25.0
TIMEOUT_S = 8.0
"""Of the group in which a rank is stopped."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        rank, step: where it happens.
        delay_s: after the step has begun, or the set-up.
    """

    seed: int
    kind: str
    rank: int
    step: int
    delay_s: float
    ahead: bool
    strategy: Strategy
    schedule: ScheduleName
    optimizer: str


def draw(seed: int, ranks: int) -> Fault:
    random = Random(seed)
    kind = random.choice(KINDS)
    delay_s = random.uniform(0, 4.0) if kind == KINDS[1] else random.expovariate(100)
    return Fault(
        seed,
        kind,
        random.randrange(ranks),
        random.randrange(1, STEPS - 1),
        round(delay_s, 4),
        random.random() < 0.7,
        random.choice(("alltoall", "alltoall", "allreduce")),
        random.choice(SCHEDULES),
        random.choice(OPTIMIZERS),
    )


@dataclass(frozen=True)
class Ended:
    """How and when (`time.time`) a rank ended. The error is "" if the rank reached its last step."""

    at_s: float
    error: str = ""


def train(rank: int, ranks: int, fault: Fault, marks: Path) -> Ended:
    """Trains until the last step, or until an error."""
    warnings.simplefilter("ignore")
    mine = fault.rank == rank

    def happen() -> None:
        (marks / "moment").write_text(str(time.time()))
        if fault.kind == "stopped":
            subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stopped" else signal.SIGKILL)

    timer = threading.Timer(fault.delay_s, happen)
    timer.daemon = True
    if mine and fault.kind == KINDS[1]:
        timer.start()
    try:
        return _train(rank, fault, timer if mine and fault.kind in ("killed", "stopped") else None, marks)
    except Exception as error:
        return Ended(time.time(), f"{type(error).__name__}: {error}")


def _train(rank: int, fault: Fault, timer: threading.Timer | None, marks: Path) -> Ended:
    timeout = timedelta(seconds=TIMEOUT_S if fault.kind == "stopped" else 60.0)
    plain = make_model()
    optimizer = make_optimizers(fault.optimizer, plain)[0]
    model: Any = embrace_fx.compile(
        plain,
        optimizer=optimizer,
        strategy=fault.strategy,
        schedule=fault.schedule,
        process_group=dist.new_group(timeout=timeout),
    )
    batches = [draw_batch(step, rank) for step in range(STEPS)]
    for step, batch in enumerate(model.lookahead(batches) if fault.ahead else batches):
        now = step == fault.step
        if now and timer is not None:
            timer.start()
        if now and (fault.kind, fault.rank) == ("raises", rank):
            (marks / "moment").write_text(str(time.time()))
            os._exit(1)  # like a script that ends by an exception
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Ended(time.time())


@dataclass(frozen=True)
class Found:
    """What came of a fault.

    Attributes:
        after_s: the last rank's error, counted from the fault; None where training went on.
        errors: of the other ranks.
        wrong: what should not be; empty: nothing.
    """

    fault: Fault
    after_s: float | None
    errors: tuple[str, ...]
    wrong: str


def try_fault(fault: Fault, ranks: int) -> Found:
    with tempfile.TemporaryDirectory() as name:
        outcomes = fresh_ranks(ranks, train, fault, Path(name), timeout_s=200.0)
        moment = Path(name) / "moment"
        at_s = float(moment.read_text()) if moment.exists() else None
    others = [(rank, outcome) for rank, outcome in enumerate(outcomes) if rank != fault.rank]
    ends = [outcome.result for _, outcome in others]
    if any(end is None for end in ends):
        return Found(fault, None, tuple(repr(outcome.exception) for _, outcome in others), "a rank has not ended")
    if at_s is None or all(end is not None and not end.error for end in ends):
        return Found(fault, None, (), "")  # this rank had already finished when the other one failed
    errors = tuple(end.error for end in ends if end is not None)
    after_s = max(end.at_s for end in ends if end is not None) - at_s
    wrong = "" if all(_names(error, fault.rank) for error in errors) else "an error does not name the rank"
    if after_s > WITHIN_S:
        wrong = f"{wrong}; it came after {after_s:.1f} s"
    return Found(fault, round(after_s, 1), errors, wrong)


def _names(error: str, rank: int) -> bool:
    return any(
        each in error for each in (f"Rank(s) {rank} no longer", f"rank {rank} has not launched", f"rank {rank} is in")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong, after_s = list[int](), list[float]()
    for seed in range(given.seed, given.seed + given.count):
        found = try_fault(draw(seed, given.ranks), given.ranks)
        if found.wrong:
            wrong.append(seed)
        if found.after_s is not None:
            after_s.append(found.after_s)
        print(f"{found.fault}: {found.wrong or 'as it should'}, {found.after_s} s, {found.errors}", flush=True)
    told = f"median {statistics.median(after_s):.1f} s, at most {max(after_s):.1f} s" if after_s else "none"
    print(f"{given.count} faults from seed {given.seed}, {len(wrong)} ended otherwise than they should: {wrong}.")
    print(f"From a fault to the last rank's error: {told}.")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
