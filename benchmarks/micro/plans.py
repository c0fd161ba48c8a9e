"""One script run again and again: does it keep its plan and its schedule?

    python -m benchmarks.micro.plans --runs 10 --load 0 10 --output benchmarks/results/plans.md

Each run is new processes, which probe their links and train `--steps` steps; runs of a model share a cache, as those of
one user do. With `--load 10`, ten busy loops run beside them. The models are the lab's, under Adam, `small`, a language
model of one table, and Hugging Face's GPT-2, BERT and T5.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import embrace_fx
from benchmarks.micro.language_models import LANGUAGE_MODELS, WORDS
from benchmarks.models import MODELS
from embrace_fx.runtime.probe.disk_cache import VARIABLE

SMALL = "small"
NAMES = (*MODELS, SMALL, *LANGUAGE_MODELS)


def made(name: str, rank: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Makes a model and a rank's batch."""
    random = torch.Generator().manual_seed(rank)
    if name == SMALL:
        layers = nn.Embedding(8_000, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 50)
        return nn.Sequential(*layers), (torch.randint(8_000, (32, 16), generator=random),)
    if name in LANGUAGE_MODELS:
        return LANGUAGE_MODELS[name](), (torch.randint(WORDS, (4, 32), generator=random),)
    return MODELS[name]["lab"].make(), MODELS[name]["lab"].batch(0, rank, 0)


def rank_main(rank: int, ranks: int, name: str, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    plain, batch = made(name, rank)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
    model = embrace_fx.compile(plain, optimizer=optimizer)
    decided = set()
    for _ in range(steps):
        model(*batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        tables = [decision for decision in model.plan if decision.candidates]
        decided.add((tuple((d.parameter, d.name) for d in tables), model.plan.schedule_name))
    if rank == 0:
        plan = ", ".join(f"{d.parameter} {d.name}" for d in tables[:3]) + (", ..." if len(tables) > 3 else "")
        found = (hash_of(*decided), model.plan.schedule_name, len(decided) - 1, plan)
        Path(folder, "plan").write_text("|".join(map(str, found)), encoding="utf-8")
    dist.barrier()
    model.close()
    dist.destroy_process_group()


def hash_of(*decided: object) -> str:
    """Returns a short name of a plan that is the same in all processes."""
    return hashlib.sha256(repr(decided).encode()).hexdigest()[:6]


def spin() -> None:
    """Keeps a processor busy."""
    while True:
        pass


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Opens a context during which this many processes run busy loops."""
    processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(loops)]
    for each in processes:
        each.start()
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=NAMES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--load", type=int, nargs="*", default=[0], help="busy loops beside the ranks, in turns")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    lines = [
        "| model | run | busy loops | load | plan | schedule | changes | its tables |",
        "|---|---|---|---|---|---|---|---|",
    ]
    differ, changed = [], []
    for name in asked.models:
        with tempfile.TemporaryDirectory() as cache:
            os.environ[VARIABLE] = cache
            plans = set()
            for loops in asked.load:
                for run in range(asked.runs):
                    with tempfile.TemporaryDirectory() as folder, busy(loops):
                        spawn(rank_main, (asked.ranks, name, asked.steps, folder), nprocs=asked.ranks)
                        found = Path(folder, "plan").read_text(encoding="utf-8").split("|")
                        load = os.getloadavg()[0]
                    plans.add(found[0])
                    changed += [name] if int(found[2]) else []
                    lines.append(f"| {name} | {run + 1} | {loops} | {load:.1f} | {' | '.join(found)} |")
                    print(lines[-1], flush=True)
        differ += [name] if len(plans) > 1 else []
    told = f"Plans that differ: {', '.join(differ) or 'none'}; that change in a run: {', '.join(changed) or 'none'}."
    print(told)
    if asked.output is not None:
        command = f"python -m benchmarks.micro.plans --models {' '.join(asked.models)} --runs {asked.runs}"
        command += f" --steps {asked.steps} --load {' '.join(map(str, asked.load))}"
        head = f"# Plans from run to run\n\n`{command}`, {asked.ranks} local ranks, "
        asked.output.write_text("\n".join([f"{head}torch {torch.__version__}. {told}", "", *lines, ""]), "utf-8")


if __name__ == "__main__":
    main()
