"""Rounds of a soak on a rank: a model's life next to its reference, and what the process holds after it."""

from __future__ import annotations

import gc
import json
import logging
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.soak.deeds import run_epoch
from tests.soak.plan import Round, draw_round
from tests.soak.sides import CompiledSide, PlainSide, differ_among_ranks, differences


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    resident_mib: float
    threads: int
    descriptors: int
    groups: int

    @staticmethod
    def now() -> Held:
        gc.collect()
        deadline_s, threads = time.monotonic() + 5.0, -1
        while threads != (threads := _count("task")) and time.monotonic() < deadline_s:
            time.sleep(0.2)  # one that has ended may still be there
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Held(round(pages * 4096 / 2**20, 2), threads, _count("fd"), len(dist.distributed_c10d._world.pg_map))


def _count(what: str) -> int:
    return len(list(Path(f"/proc/self/{what}").iterdir()))


@dataclass(frozen=True)
class Lived:
    """What became of a round.

    Attributes:
        deeds: by kind, how many.
        wrong: what differed from the reference, or among ranks; empty: nothing.
        early, late: what the process held after the first half of the epochs, and after the last.
        closed: after the model was closed.
    """

    round: dict[str, Any]
    seconds: float
    deeds: dict[str, int]
    wrong: list[str]
    early: Held
    late: Held
    closed: Held


def live(life: Round, rank: int) -> Lived:
    """Runs a round on both sides."""
    began_s = time.monotonic()
    compiled, plain = CompiledSide(life), PlainSide(life)
    early = None
    for k, epoch in enumerate(life.epochs):
        for side in (compiled, plain):
            run_epoch(side, epoch, rank)
        if k == len(life.epochs) // 2:
            early = Held.now()
    found, expected = compiled.parameters(), plain.parameters()
    wrong = [f"{name} is {by:.2g} from the reference" for name, by in differences(found, expected).items()]
    wrong += [f"{name} differs among ranks" for name in differ_among_ranks(found)]
    if len(compiled.log) != len(plain.log):
        wrong.append("the sides have not done the same")
    logged, wanted = (torch.tensor(side.log, dtype=torch.float64) for side in (compiled, plain))
    if not wrong and not torch.allclose(logged, wanted, rtol=1e-7, atol=1e-10):
        wrong.append("losses or norms differ from the reference")
    late = Held.now()
    compiled.model.close()
    del compiled, plain
    told = {key: value for key, value in asdict(life).items() if key != "epochs"}
    deeds = Counter(deed.kind for epoch in life.epochs for deed in epoch.deeds[: epoch.left_after])
    assert early is not None
    return Lived(told, round(time.monotonic() - began_s, 1), dict(deeds), wrong, early, late, Held.now())


def soak(rank: int, ranks: int, seed: int, minutes: float, rounds: int, epochs: int, log: Path | None) -> list[Lived]:
    """Rounds until the time is over, or so many; seeds follow each other."""
    logging.getLogger("embrace_fx").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")  # of steps given up, and of batches that were not looked ahead to
    ends_s = time.monotonic() + 60 * minutes
    lived: list[Lived] = []
    while len(lived) < rounds:
        go_on = torch.tensor(float(time.monotonic() < ends_s))
        dist.broadcast(go_on, 0)
        if not go_on:
            break
        life = draw_round(seed + len(lived), ranks, epochs)
        if rank == 0:
            print(f"seed {life.seed}: {life.strategy}, {life.schedule}, {life.optimizer}", file=sys.stderr, flush=True)
        found = live(life, rank)
        lived.append(found)
        if log is not None:
            with log.with_suffix(f".rank{rank}.jsonl").open("a") as file:
                file.write(json.dumps(asdict(found)) + "\n")
        if found.wrong:
            raise AssertionError(f"seed {life.seed} on rank {rank}: {'; '.join(found.wrong)}")
    return lived
