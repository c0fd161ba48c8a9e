"""Rounds of the soak on links whose rate changes: `python -m tests.soak.links --minutes 10` (root, `ip` and `tc`).

Each rank is a host of its own on a limited link. At random moments one rank's link is made slower, by up to a factor of
10,000, or as fast as it was again. Nothing may hang, and the parameters must be the reference's all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from random import Random

import torch.distributed as dist

from benchmarks.network import Links, Network, network
from tests.soak.rounds import soak

FAST_MBIT = 1000.0
RATES_MBIT = (FAST_MBIT, 100.0, 10.0, 1.0, 0.1)
MEAN_S = 1.0
"""Between two changes."""
DONE = "soaked "


def live_on_links(seed: int, minutes: float, rounds: int, epochs: int) -> None:
    """One rank's part; it prints what has become of its rounds."""
    dist.init_process_group("gloo")
    lived = soak(dist.get_rank(), dist.get_world_size(), seed, minutes, rounds, epochs, None)
    print(DONE + json.dumps([len(lived), sum(sum(each.deeds.values()) for each in lived)]))
    dist.destroy_process_group()


def change_rates(hosts: Network, ranks: int, random: Random, ended: threading.Event) -> list[float]:
    """Changes links until the end; returns the rates, in the order of the changes."""
    rates: list[float] = []
    while not ended.wait(random.expovariate(1 / MEAN_S)):
        rates.append(random.choice(RATES_MBIT))
        hosts.set_rate(random.randrange(ranks), rates[-1])
    return rates


def soak_on_links(ranks: int, seed: int, minutes: float, rounds: int, epochs: int, timeout_s: float) -> str:
    """Runs it, and says in a sentence what has come of it.

    Raises:
        RankFailed: a rank has found other parameters than the reference's, or has not come to its end.
    """
    ended, rates = threading.Event(), list[float]()
    command = [sys.executable, "-m", "tests.soak.links", "--rank", f"--seed={seed}", f"--minutes={minutes}"]
    command += [f"--rounds={rounds}", f"--epochs={epochs}"]
    with network(Links(ranks, FAST_MBIT)) as hosts:
        changing = threading.Thread(
            target=lambda: rates.extend(change_rates(hosts, ranks, Random(seed), ended)), daemon=True
        )
        changing.start()
        try:
            environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
            outputs = hosts.run(command, timeout_s=timeout_s, environment=environment)
        finally:
            ended.set()
            changing.join()
    told = {line for output in outputs for line in output.splitlines() if line.startswith(DONE)}
    if len(told) != 1:
        raise RuntimeError(f"expected all ranks to have done the same, found {sorted(told)}.")
    models, steps = json.loads(told.pop().removeprefix(DONE))
    slow = sum(rate < FAST_MBIT for rate in rates)
    return (
        f"{models} models, {steps} steps on {ranks} ranks, seeds {seed} to {seed + models - 1}; links were changed "
        f"{len(rates)} times, {slow} times to {RATES_MBIT[-1]:g} to {RATES_MBIT[1]:g} Mbit/s; 0 models differ from the "
        "reference, no rank hung."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--epochs", type=int, default=4, help="of a model, at most")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    settings = (given.seed, given.minutes, given.rounds, given.epochs)
    if given.rank:
        live_on_links(*settings)
    else:
        print(soak_on_links(given.ranks, *settings, timeout_s=60 * given.minutes + 900))


if __name__ == "__main__":
    main()
