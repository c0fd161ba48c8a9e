"""Hours of random loops and random faults, compared with a reference: `python -m tests.soak --minutes 60`.

A failure prints the seed of its round: `--seed SEED --rounds 1` runs that round alone.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path

from tests.soak.rounds import Lived, soak
from tests.support.ranks import fresh_ranks


def summary(by_rank: list[list[Lived]], ranks: int, seconds: float, seed: int) -> str:
    """What a soak has found, as a page."""
    lived = by_rank[0]
    deeds = Counter[str]()
    for each in lived:
        deeds.update(each.deeds)
    wrong = sum(bool(each.wrong) for each in lived)
    lines = [
        f"# Soak of {seconds / 60:.0f} minutes on {ranks} ranks",
        "",
        f"{len(lived)} models, {sum(deeds.values())} steps, seeds {seed} to {seed + len(lived) - 1}; {wrong} of the "
        "models differ from the reference, or among ranks. No rank hung.",
        "",
        "| | after the first model | in the middle | at the end |",
        "|---|---|---|---|",
    ]
    for rank, rounds in enumerate(by_rank):
        held = [rounds[k].closed for k in (0, len(rounds) // 2, -1)]
        for what in ("resident_mib", "threads", "descriptors", "groups"):
            values = " | ".join(str(getattr(each, what)) for each in held)
            lines.append(f"| {what.replace('_', ' ')}, rank {rank} | {values} |")
    grown = [each.late.resident_mib - each.early.resident_mib for each in lived]
    lines += [
        "",
        "From the middle of a model's life to its end resident memory grew by "
        f"{sum(grown) / len(grown):.2f} MiB in the mean, {max(grown):.2f} MiB at most.",
        "",
        "| done | times |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in sorted(deeds.items())),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1_000_000, help="at most so many")
    parser.add_argument("--epochs", type=int, default=40, help="of a model, at most")
    parser.add_argument("--output", type=Path, default=Path("build/soak"))
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    limit_s = 60 * given.minutes + 900
    arguments = (given.seed, given.minutes, given.rounds, given.epochs, given.output / f"seed-{given.seed}")
    outcomes = fresh_ranks(given.ranks, soak, *arguments, timeout_s=limit_s)
    for rank, outcome in enumerate(outcomes):
        if outcome.exception is not None:
            print(f"rank {rank}: {type(outcome.exception).__name__}: {outcome.exception}\n{outcome.traceback}")
    if any(outcome.exception is not None for outcome in outcomes):
        raise SystemExit(1)
    by_rank = [outcome.result for outcome in outcomes if outcome.result is not None]
    page = summary(by_rank, given.ranks, time.monotonic() - began_s, given.seed)
    (given.output / f"seed-{given.seed}.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
