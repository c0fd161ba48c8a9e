"""What AdamW does to a shard on a CPU, beside the time that its bytes take at the rate of a copy. One thread.

    python -m benchmarks.micro.adamw_kernels --rows 500000 --columns 8

sweep       torch's own step over all rows, a few of which have a gradient
rows        the same step over the rows that have one
replay T    rows that have rested for T steps take them all at once

A floor counts every byte once: weights and two averages read and written, gradients read, ids and counters of steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from embrace_fx.runtime.tables.own_step import State, hyperparameters, step_rows
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.skipped_steps import Decaying

RESTED = (1, 10, 100, 1000)
COPIED_BYTES = 256 * 2**20
REPEATS = 15


@dataclass
class Shard:
    """A table's part (V', d) under AdamW, of which K rows at a time are taken, others each time."""

    rows: int
    columns: int
    batch: int

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.local = torch.randn((self.rows, self.columns), generator=random)
        self.gradients = torch.randn((self.batch, self.columns), generator=random)
        self.ids = [torch.randperm(self.rows, generator=random)[: self.batch].sort().values for _ in range(REPEATS)]
        parameter = nn.Parameter(self.local)
        self.optimizer = AdamW([parameter], lr=1e-3)
        self.options = hyperparameters(self.optimizer.param_groups[0])
        averages = {name: self.local.abs() * 1e-3 for name in ("exp_avg", "exp_avg_sq")}
        self.state: State = {"step": torch.tensor(1000.0), **averages}
        self.optimizer.state[parameter] = dict(self.state)
        layout = Layout.of_table("table", self.local.shape)
        self.table = RowTable(parameter, layout, "exact", self.optimizer)  # swept

    @property
    def row_bytes(self) -> int:
        return self.columns * self.local.itemsize


def _ms(call: Callable[[int], object]) -> float:
    """The median; the first call is not counted."""
    times = []
    for k in range(REPEATS):
        begun_s = time.perf_counter()
        call(k)
        times.append((time.perf_counter() - begun_s) * 1e3)
    return statistics.median(times[1:])


def _copy_bytes_per_ms() -> float:
    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / _ms(lambda _: target.copy_(source))


def _replay(shard: Shard, rested: int) -> Callable[[int], object]:
    history = Decaying(shard.local.device)
    for _ in range(rested):
        history.note(shard.options, shard.state)
    taken = [torch.zeros(shard.rows, dtype=torch.int32) for _ in range(REPEATS)]
    return lambda k: history.take(shard.local, shard.state, shard.ids[k], taken[k])


def kernels(shard: Shard) -> dict[str, tuple[Callable[[int], object], int]]:
    """Each with the bytes that it has to move."""
    optimizer, options, local, state = shard.optimizer, shard.options, shard.local, shard.state
    gradients: Tensor = shard.gradients
    of_rows = shard.batch * (7 * shard.row_bytes + 8)
    of_rested = shard.batch * (6 * shard.row_bytes + 8 + 2 * 4)
    found: dict[str, tuple[Callable[[int], object], int]] = {
        "sweep": (
            lambda k: shard.table.begin_step().finish([(shard.ids[k], gradients)]),
            6 * shard.rows * shard.row_bytes + shard.batch * (shard.row_bytes + 8),
        ),
        "rows": (lambda k: step_rows(optimizer, options, local, state, shard.ids[k], gradients), of_rows),
    }
    for rested in RESTED:
        found[f"replay {rested}"] = _replay(shard, rested), of_rested
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000, help="of the shard")
    parser.add_argument("--columns", type=int, default=8, help="of the shard")
    parser.add_argument("--batch", type=int, default=2_000, help="rows that are read in a step")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rate = _copy_bytes_per_ms()
    print(f"copy: {rate / 1e6:.2f} GB/s, read and written; load {os.getloadavg()[0]:.1f}")
    print("kernel            MB        ms  floor ms  times the floor")
    with torch.no_grad():
        for name, (call, moved) in kernels(Shard(given.rows, given.columns, given.batch)).items():
            ms, floor_ms = _ms(call), moved / rate
            print(f"{name:12} {moved / 1e6:8.2f} {ms:9.3f} {floor_ms:9.3f} {ms / floor_ms:9.1f}")


if __name__ == "__main__":
    main()
