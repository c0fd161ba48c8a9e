"""One script run again and again: does it keep its plan?

    python -m benchmarks.micro.plans --models lm small --output benchmarks/results/plans.md

Each run is new processes, which probe their links while the machine does whatever else it does; runs of a model share
a cache, as those of one user do. The models are the lab's, under Adam, and `small`, a language model of one table.
Beside the plan stands the strategy that this run's links alone would have made the fastest, for one table.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import embrace_fx
from benchmarks.models import MODELS
from embrace_fx.runtime.probe.disk_cache import VARIABLE

SMALL = "small"


def rank_main(rank: int, ranks: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    batch: tuple[Tensor, ...]
    if name == SMALL:
        plain: nn.Module = nn.Sequential(nn.Embedding(8_000, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 50))
        batch = (torch.randint(8_000, (32, 16), generator=torch.Generator().manual_seed(rank)),)
    else:
        plain, batch = MODELS[name]["lab"].make(), MODELS[name]["lab"].batch(0, rank, 0)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
    model = embrace_fx.compile(plain, optimizer=optimizer)
    model(*batch).square().mean().backward()
    if rank == 0:
        tables = [decision for decision in model.plan if decision.is_table]
        fastest = min(tables[0].candidates, key=lambda each: each.predicted_ms).name if tables[0].candidates else ""
        plan = ", ".join(f"{d.parameter} {d.name}" for d in tables[:3]) + (", ..." if len(tables) > 3 else "")
        kept = hash_of(tuple((d.parameter, d.name) for d in tables))
        Path(folder, "plan").write_text(f"{kept}|{plan}|{tables[0].parameter} {fastest}")
    dist.barrier()
    model.close()
    dist.destroy_process_group()


def hash_of(decided: tuple[tuple[str, str], ...]) -> str:
    """A short name of a plan, the same in all processes."""
    return hashlib.sha256(repr(decided).encode()).hexdigest()[:6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[*MODELS, SMALL])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    lines = [
        "| model | run | plan | its tables | fastest by this run's links alone | load |",
        "|---|---|---|---|---|---|",
    ]
    differ = []
    for name in asked.models:
        with tempfile.TemporaryDirectory() as cache:
            os.environ[VARIABLE] = cache
            plans = set()
            for run in range(asked.runs):
                with tempfile.TemporaryDirectory() as folder:
                    spawn(rank_main, (asked.ranks, name, folder), nprocs=asked.ranks)
                    kept, plan, fastest = Path(folder, "plan").read_text().split("|")
                plans.add(kept)
                load = os.getloadavg()[0]
                lines.append(f"| {name} | {run + 1} | {kept} | {plan} | {fastest} | {load:.1f} |")
                print(lines[-1], flush=True)
        differ += [name] if len(plans) > 1 else []
    told = f"Plans that differ: {', '.join(differ) or 'none'}."
    print(told)
    if asked.output is not None:
        command = f"python -m benchmarks.micro.plans --models {' '.join(asked.models)} --runs {asked.runs}"
        head = f"# Plans from run to run\n\n`{command}`, {asked.ranks} local ranks, "
        asked.output.write_text("\n".join([f"{head}torch {torch.__version__}. {told}", "", *lines, ""]), "utf-8")


if __name__ == "__main__":
    main()
