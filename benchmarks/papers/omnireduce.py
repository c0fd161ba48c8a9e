"""OmniReduce's micro-benchmark (SIGCOMM 2021): 100 MiB of which so many blocks are not zero, over AllReduce's time.

Non-zero blocks of 256 elements lie at random, on each worker anew; an aggregator sits beside every worker. One figure
of such a setting is known here: 3.1 ms against NCCL's 17.2 at 99 % sparsity, with GPUDirect. It is taken to be of eight
workers at 100 Gb/s, whose ring AllReduce sends for 14.7 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.papers.zen import BLOCK, BYTES_PER_MS_OF_GBIT, FLOAT_BYTES
from embrace_fx.cost.devices import DEVICES
from embrace_fx.cost.exchanges import predict
from embrace_fx.cost.sparsity import independent

DENSITIES = (1.0, 0.8, 0.4, 0.2, 0.1, 0.08, 0.04, 0.02, 0.01)
WORKERS = (2, 4, 8)
BLOCKS = 100 * 2**20 // (BLOCK * FLOAT_BYTES)
GBIT = 100
PUBLISHED = {(8, 0.01): 5.5}
"""(workers, density) -> NCCL's time over OmniReduce's."""


@dataclass(frozen=True)
class Row:
    """One density: AllReduce's predicted time over OmniReduce's, and over what its bytes alone take."""

    workers: int
    density: float
    speedup: float
    by_bytes: float
    published: float | None


def rows() -> Iterator[Row]:
    """All settings."""
    cluster = DEVICES["V100"].cluster(GBIT * BYTES_PER_MS_OF_GBIT)
    for workers in WORKERS:
        for density in DENSITIES:
            lying = independent(BLOCKS, BLOCK, FLOAT_BYTES, (round(BLOCKS * density),) * workers)
            dense, sparse = (predict(way, lying, cluster=cluster) for way in ("allreduce", "omnireduce"))
            bytes_alone = dense.mean.sent_bytes / sparse.mean.sent_bytes
            yield Row(
                workers,
                density,
                dense.time_ms(cluster) / sparse.time_ms(cluster),
                bytes_alone,
                PUBLISHED.get((workers, density)),
            )
