"""What row-wise Adagrad costs a recommender: its steps next to Adagrad's, in turns.

    python -m benchmarks.micro.row_wise --ranks 2 4 --output benchmarks/results/row-wise.md

26 tables of 16 columns, sharded, a batch of 256 a rank. Both models train in the same processes, some steps each in
turns; a turn's ratio is told by its medians, so that what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import embrace_fx

TABLES, ROWS, WIDTH, BATCH = 26, 20_000, 16, 256
WARM_UP, STEPS = 14, 10
KINDS = {"Adagrad": torch.optim.Adagrad, "RowWiseAdagrad": embrace_fx.RowWiseAdagrad}


class Recommender(nn.Module):
    """Tables, and layers over what they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(TABLES))
        self.top = nn.Sequential(nn.Linear(TABLES * WIDTH, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: Tensor) -> Tensor:
        columns = torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        loss: Tensor = self.top(columns).square().mean()
        return loss


def training(kind: str, rank: int) -> Iterator[float]:
    """Endless steps: what each takes, in milliseconds."""
    torch.manual_seed(0)
    plain = Recommender()
    optimizers = (
        KINDS[kind]([table.weight for table in plain.tables], lr=0.01),
        torch.optim.Adagrad(plain.top.parameters(), lr=0.01),
    )
    model = embrace_fx.compile(plain, optimizer=optimizers, strategy={"tables.*": "alltoall"})
    random = torch.Generator().manual_seed(rank)
    batches = (torch.randint(ROWS, (BATCH, TABLES), generator=random) for _ in iter(int, 1))
    began_s = time.perf_counter()
    for ids in model.lookahead(batches):
        model(ids).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield (time.perf_counter() - began_s) * 1e3
        began_s = time.perf_counter()


def rank_main(rank: int, ranks: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    trainings = {kind: training(kind, rank) for kind in KINDS}
    pairs = []
    for number in range(rounds + 1):
        turn = {}
        for kind, each in trainings.items():
            next(each)  # what the other one has left is on its way no more
            turn[kind] = statistics.median(next(each) for _ in range(STEPS if number else WARM_UP))
            dist.barrier()
        if number:
            pairs.append(turn)
    if rank == 0:
        ratios = sorted(turn["RowWiseAdagrad"] / turn["Adagrad"] for turn in pairs)
        medians = [statistics.median(turn[kind] for turn in pairs) for kind in KINDS]
        row = f"| {ranks} | {medians[0]:.1f} | {medians[1]:.1f} | {statistics.median(ratios):.2f} |"
        quarter = len(ratios) // 4
        Path(folder, "row").write_text(f"{row} {ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f} |\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = ["| ranks | Adagrad ms | RowWiseAdagrad ms | ratio | quartiles |\n", "|---|---|---|---|---|\n"]
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(rank_main, (ranks, options.rounds, folder), nprocs=ranks)
            lines.append(Path(folder, "row").read_text())
        print(lines[-1], end="", flush=True)
    if options.output is not None:
        head = (
            f"# Row-wise Adagrad\n\n`python -m benchmarks.micro.row_wise`, torch {torch.__version__}: {TABLES} tables "
        )
        text = (
            f"{head}of {ROWS} x {WIDTH}, batches of {BATCH} a rank; median step, of {options.rounds} turns of {STEPS}."
        )
        options.output.write_text("\n".join([text, "", "".join(lines)]), encoding="utf-8")


if __name__ == "__main__":
    main()
