"""What a rank's processor does in an exchange, timed without any network: the constants of `exchange_cost`.

    python -m benchmarks.exchanges_handling

A tensor of 100 MiB with 1 % of its blocks, for several block sizes: the time to find them, and the time to gather,
encode, decode, add and write each of them, one thread on one core. The latter is fitted to so much per block and so
much per byte.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from embrace_fx.runtime.exchanges.blocks import block_bitmap, write_blocks_
from embrace_fx.runtime.exchanges.gradient import mean_by_id
from embrace_fx.runtime.exchanges.records import decode_records, encode_records

ELEMENTS = 25 * 2**20
DENSITY = 0.01
BLOCK_SIZES = (1, 8, 64, 256, 512, 1024)
RUNS = 7


def measured(block_size: int) -> tuple[float, float]:
    """Milliseconds to find the blocks, and to handle each once: to gather, encode, decode, add and write it."""
    blocks = ELEMENTS // block_size
    dense = torch.zeros(ELEMENTS)
    ids = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))[: round(DENSITY * blocks)]
    dense[: blocks * block_size].view(blocks, block_size)[ids] = 1.0
    ids = ids.sort().values
    cut = dense[: blocks * block_size].view(blocks, block_size)

    def handle() -> None:
        flat = encode_records(ids, cut.index_select(0, ids), blocks).view(-1)
        found, rows = decode_records(flat, blocks, block_size, dense.dtype)
        write_blocks_(dense, mean_by_id(found, rows, [found.numel()], blocks, 1))

    return median_ms(lambda: block_bitmap(cut)), median_ms(handle) / ids.numel()


def median_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    print("| block | to find them, ms per 100 MiB | to handle one, ns |\n|---|---|---|")
    found = []
    for size in BLOCK_SIZES:
        find_ms, each_ms = measured(size)
        found.append((size, each_ms))
        print(f"| {size} | {find_ms:.1f} | {each_ms * 1e6:.0f} |")
    weights = np.array([1 / ms for _, ms in found])
    terms = np.array([(1.0, 4.0 * size) for size, _ in found])
    (per_block, per_byte), *_ = np.linalg.lstsq(terms * weights[:, None], np.ones(len(found)))
    print(f"\n{per_block * 1e6:.0f} ns per block and {per_byte * 1e6:.2f} ns per byte")


if __name__ == "__main__":
    main()
