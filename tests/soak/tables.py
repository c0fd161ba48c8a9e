"""Random loops over tables beyond memory, compared with the same tables in memory: `python -m tests.soak.tables`.

A failure prints the seed of its round: `--seed SEED --rounds 1` runs that round alone.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from tests.support.tiers import DEEDS, OPTIMIZERS, Loop, assert_same_loop

ROWS, STEPS = 2000, 60


def loop_of(seed: int) -> tuple[int, Loop]:
    """Returns a random number of ranks and a random loop."""
    draw = random.Random(seed)
    shares = [round(2 ** draw.uniform(-4.5, -0.2), 3) for _ in range(2)]
    memory = draw.choice([shares[0], dict(zip(("words.*", "bags.*"), shares, strict=True)), {"words.*": shares[0]}])
    return draw.choice([1, 2, 2, 3]), Loop(
        memory,
        [draw.choice(("update", draw.choice(DEEDS))) for _ in range(STEPS)],
        optimizer=draw.choice(list(OPTIMIZERS)),
        schedule=draw.choice(["none", "vertical", "horizontal", "2d"]),
        ahead=draw.randint(1, 6),
        epoch=draw.choice([STEPS, 23, 7]),
        seed=seed,
        rows=ROWS,
        alike=draw.random() < 0.4,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1_000_000, help="at most so many")
    given = parser.parse_args()
    ends_s, done, wrong = time.monotonic() + 60 * given.minutes, Counter[str](), list[int]()
    for seed in range(given.seed, given.seed + given.rounds):
        if time.monotonic() > ends_s:
            break
        ranks, loop = loop_of(seed)
        try:
            assert_same_loop(ranks, loop)
        except Exception as error:
            wrong.append(seed)
            print(f"seed {seed}, {ranks} ranks, {loop}: {str(error)[:2000]}", flush=True)
        done.update(loop.deeds)
        done["rounds"] += 1
    print(f"{done.pop('rounds')} rounds of {STEPS} steps from seed {given.seed}, {len(wrong)} wrong: {wrong}")
    print(", ".join(f"{kind} {count}" for kind, count in sorted(done.items())))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
