"""Random loops beside DDP for as long as one likes: `python -m tests.soak --minutes 60`.

A failure prints its seed: `--seed SEED --rounds 1` runs the loops of that seed alone.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings

import torch
import torch.distributed as dist

from tests.support.programs import run_changes
from tests.support.ranks import fresh_ranks

LOOPS, STEPS = 10, 40
"""Loops of a seed, and steps of a loop."""


def soak(rank: int, ranks: int, seed: int, minutes: float, rounds: int, loops: int = LOOPS) -> int:
    """Runs the loops of one seed after the other until the time is over; returns the next seed."""
    logging.getLogger("embrace_fx").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    ends_s = time.monotonic() + 60 * minutes
    for number in range(seed, seed + rounds):
        go_on = torch.tensor(float(time.monotonic() < ends_s))
        dist.broadcast(go_on, 0)
        if not go_on:
            return number
        if rank == 0:
            print(f"seed {number}", file=sys.stderr, flush=True)
        run_changes(rank, ranks, loops, STEPS, number)
    return seed + rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1_000_000, help="at most so many seeds")
    given = parser.parse_args()
    limit_s = 60 * given.minutes + 900
    outcomes = fresh_ranks(given.ranks, soak, given.seed, given.minutes, given.rounds, timeout_s=limit_s)
    for rank, outcome in enumerate(outcomes):
        if outcome.exception is not None:
            print(f"rank {rank}: {type(outcome.exception).__name__}: {outcome.exception}\n{outcome.traceback}")
    if any(outcome.exception is not None for outcome in outcomes):
        raise SystemExit(1)
    print(f"Seeds {given.seed} to {outcomes[0].result - 1 if outcomes[0].result else given.seed}: no loop differs.")


if __name__ == "__main__":
    main()
