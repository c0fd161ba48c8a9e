"""Output layers sharded, whole, and as "auto" has them: which is faster, and does "auto" pick it?

    python -m benchmarks.micro.heads --output benchmarks/results/heads.md
    python -m benchmarks.micro.heads --gpt2 --rate-mbit 200

Ranks on links of their own (`benchmarks/network.py`) train a language model of one small layer, tied and with an output
layer of its own, at several numbers of positions per row of the table (N T / V). The three plans take their steps in
turns. "auto" measures the links by itself; it is right where it picks the faster one of the two, or one whose steps
take at most 5 % longer. `--gpt2` trains Hugging Face's GPT-2, two layers, its own 50,257 words, beside DDP.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from benchmarks.network import Links, network

ROWS, WIDTH = 3_000, 96
RATIOS = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Positions of all ranks in a step, per row of the table."""
WITHIN = 1.05
STRATEGIES = ("vocabulary", "allreduce", "auto")


class Words(nn.Module):
    """Predicts words."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(self.words(words)))), labels)


def training(
    strategy: str, positions: int, rank: int, *, tied: bool
) -> tuple[Callable[[], None], Callable[[], str], Callable[[], None]]:
    """Returns three functions: one takes a step, one returns the strategy of the output layer's table, and one ends the
    training.
    """
    torch.manual_seed(0)
    plain = Words(tied=tied)
    table = "words.weight" if tied else "head.weight"
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    model = embrace_fx.compile(
        plain, optimizer=optimizer, strategy="auto" if strategy == "auto" else {table: strategy}, route="graph"
    )
    batch = torch.randint(ROWS, (2, positions), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        model(batch[0], batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: model.plan[table].strategy, model.close


def rank_main(turns: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for tied, ratio in product((True, False), RATIOS):
        positions = max(1, round(ratio * ROWS / ranks))
        trainings = {each: training(each, positions, rank, tied=tied) for each in STRATEGIES}
        taken: dict[str, list[float]] = {each: [] for each in STRATEGIES}
        for turn in range(turns + 1):
            for each, (step, *_) in trainings.items():
                step()  # untimed, so that launches in flight of the previous training do not count
                dist.barrier()
                began_s = time.perf_counter()
                step()
                dist.barrier()
                if turn:
                    taken[each].append((time.perf_counter() - began_s) * 1e3)
        if rank == 0:
            ms = {each: median(found) for each, found in taken.items()}
            picked = trainings["auto"][1]()
            print(
                json.dumps({"tied": tied, "ratio": ratio, "positions": positions, "picked": picked, **ms}), flush=True
            )
        for *_, close in trainings.values():
            close()
        trainings.clear()
        dist.barrier()
    dist.destroy_process_group()


def gpt2_main(turns: int) -> None:
    """Prints the milliseconds of a step and the bytes that a rank sends, of DDP and of plain `compile(model)`."""
    import transformers  # noqa: PLC0415  (an extra)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape: Any = {"vocab_size": 50_257, "n_positions": 64, "n_embd": 256, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    for name in ("ddp", "embrace_fx"):
        torch.manual_seed(0)
        plain = transformers.GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(plain.parameters(), 1e-3)
        model: Any = DistributedDataParallel(plain) if name == "ddp" else embrace_fx.compile(plain)
        ms, sent = list[float](), list[int]()
        for turn in range(turns + 2):
            words = torch.randint(50_257, (2, 64), generator=torch.Generator().manual_seed(turn * ranks + rank))
            dist.barrier()
            began_s, before = time.perf_counter(), sent_bytes()
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            ms.append((time.perf_counter() - began_s) * 1e3)
            sent.append(sent_bytes() - before)
        if rank == 0:
            found = {"system": name, "ms": median(ms[2:]), "first_ms": ms[0], "loss": float(loss)}
            found["sent_mb"] = median(sent[2:]) / 1e6
            if name != "ddp":
                found["predicted_mb"] = model.plan.sent_bytes_per_step / 1e6
            print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # skips destructors: DDP's reducer must not outlive its group


def sent_bytes() -> int:
    """Counts the bytes that this host's own interfaces have sent."""
    lines = Path("/proc/thread-self/net/dev").read_text("utf-8").splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))


def is_right(row: dict[str, float | str]) -> bool:
    """Returns whether "auto" has chosen the faster strategy, or one that takes at most 5 % longer."""
    picked, others = float(row[str(row["picked"])]), [float(row[each]) for each in STRATEGIES[:2]]
    return picked <= WITHIN * min(others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate-mbit", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--gpt2", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        gpt2_main(asked.turns) if asked.gpt2 else rank_main(asked.turns)
        return
    command = [sys.executable, "-m", "benchmarks.micro.heads", "--rank", "--turns", str(asked.turns)]
    command += ["--gpt2"] if asked.gpt2 else []
    with network(Links(asked.ranks, asked.rate_mbit)) as hosts:
        shaped = hosts.reached.shaped
        printed, *_ = hosts.run(command, timeout_s=3000, environment={"OMP_NUM_THREADS": "1"})
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    if asked.gpt2:
        print(*map(json.dumps, rows), sep="\n")
        return
    right = sum(map(is_right, rows))
    links = f"*emulated* hosts on links of {asked.rate_mbit:g} Mb/s" if shaped else "local ranks, without a limit"
    lines = [
        f"# Output layers: sharded or whole\n\n`python -m benchmarks.micro.heads --turns {asked.turns}`, "
        f"{asked.ranks} {links}, a table of "
        f"{ROWS:,} x {WIDTH}, torch {torch.__version__}, load {os.getloadavg()[0]:.0f}. Medians of {asked.turns} steps "
        f'in turns, in ms. "auto" picks the faster one, or one within 5 %, in {right} of {len(rows)}.\n',
        "| tied | N T / V | positions of a rank | vocabulary | allreduce | ratio | auto picks | auto | right |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {'yes' if row['tied'] else 'no'} | {row['ratio']:g} | {row['positions']} | {row['vocabulary']:.0f} | "
        f"{row['allreduce']:.0f} | {row['vocabulary'] / row['allreduce']:.2f} | {row['picked']} | {row['auto']:.0f} | "
        f"{'yes' if is_right(row) else 'no'} |"
        for row in rows
    ]
    print("\n".join(lines))
    if asked.output is not None:
        asked.output.write_text("\n".join([*lines, ""]), "utf-8")


if __name__ == "__main__":
    main()
