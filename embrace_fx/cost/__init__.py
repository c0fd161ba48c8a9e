"""Computes what exchanges, processors and links cost: bytes, messages, milliseconds. Nothing is measured here.

`links` has links and collectives, `devices` data sheets, `sparsity` the sparsity of gradients on all ranks, `exchanges`
each sparse exchange, `storage` tables beyond memory.
"""

from embrace_fx.cost.links import (
    Cluster,
    Collective,
    Compute,
    Exchange,
    Handling,
    Link,
    Work,
    all_gather,
    all_reduce,
    all_to_all,
    bucket_bytes,
    chunk_bytes,
    claim,
    exchange,
    gather_ids,
    launch_ms,
    passes_over,
)

__all__ = [
    "Cluster",
    "Collective",
    "Compute",
    "Exchange",
    "Handling",
    "Link",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "bucket_bytes",
    "chunk_bytes",
    "claim",
    "exchange",
    "gather_ids",
    "launch_ms",
    "passes_over",
]
