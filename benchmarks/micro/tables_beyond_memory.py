"""Tables of which memory holds a working set, on ranks of this machine.

    python -m benchmarks.micro.tables_beyond_memory time --rows 1000000 --columns 64 --memory 0.1
    python -m benchmarks.micro.tables_beyond_memory large --rows 40000000 --columns 256 --memory 1e9

time    Step time beside the same table in memory, under Zipf's law of ids: in pairs of runs, each in processes of its
        own, the first of a pair in turn. The ratio is the median over pairs of medians over steps.
large   A table on the meta device that no memory holds: step time, what a rank's process holds (RssAnon: without page
        cache), what its rows take on disk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import embrace_fx

WARM_UP = 16
STATUS = Path("/proc/self/status")


class Model(nn.Module):
    """A table, and layers that compute for a while."""

    def __init__(self, rows: int, columns: int, width: int, *, meta: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, columns, device="meta" if meta else None)
        self.layers = nn.Sequential(nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.out(self.layers(self.table(ids))).square().mean()
        return loss


def zipf(rows: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Ids, the k-th most frequent of them about 1 / k as often as the first, spread over the table."""
    rank = (rows ** torch.rand(shape, generator=generator, dtype=torch.float64) - 1).long()
    return rank * 7_368_787 % rows


def run(rank: int, args: argparse.Namespace, memory: float | None, store: str, results: Any) -> None:
    """Trains on one rank; puts its figures into a queue."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    model = Model(args.rows, args.columns, args.width, meta=args.what == "large")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    asked: Any = {"row_updates": "replay"} if memory is None else {"table_memory": memory, "tables_in": args.directory}
    compiled = embrace_fx.compile(model, optimizer=optimizer, strategy="alltoall", **asked)
    generator = torch.Generator().manual_seed(rank)
    batches = [zipf(args.rows, (args.batch, args.length), generator) for _ in range(WARM_UP + args.steps)]
    before, times, begun_s = anonymous_mib(), [], time.perf_counter()
    for ids in compiled.lookahead(batches, args.ahead):
        loss = compiled(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - begun_s) * 1e3)
        begun_s = time.perf_counter()
    told = {"ms": statistics.median(times[WARM_UP:]), "loss": loss.item(), "anonymous_mib": anonymous_mib() - before}
    told["tables"] = next((line for line in str(compiled.report()).splitlines() if "rows in memory" in line), "")
    results.put((rank, told))
    dist.barrier()
    dist.destroy_process_group()


def anonymous_mib() -> float:
    """Memory of this process that no file stands behind."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def on_ranks(args: argparse.Namespace, memory: float | None) -> dict[int, dict[str, Any]]:
    """Figures of a run, by rank."""
    context = get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run, args=(rank, args, memory, f"{folder}/store", results), daemon=True)
            for rank in range(args.ranks)
        ]
        for each in ranks:
            each.start()
        found = dict(results.get(timeout=1800) for _ in ranks)
        for each in ranks:
            each.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("time", "large"))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--memory", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--ahead", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    args = parser.parse_args()
    if args.what == "large":
        for rank, told in sorted(on_ranks(args, args.memory).items()):
            print(rank, told)
        return
    ratios = []
    for pair in range(args.pairs):
        ms = {}
        for memory in (None, args.memory) if pair % 2 else (args.memory, None):
            found = on_ranks(args, memory)
            ms[memory] = found[0]["ms"]
            print(f"pair {pair}, memory {memory}: {found[0]}")
        ratios.append(ms[args.memory] / ms[None])
    print(f"ratios {[round(each, 3) for each in ratios]}, median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
