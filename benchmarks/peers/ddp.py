"""DistributedDataParallel: dense, with sparse gradients of the tables (AllGather), and under torch.compile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.base import Task, Training, ordinary_steps, with_sparse_tables

MIB = 2**20
BUCKETS = 8


@dataclass(frozen=True)
class Ddp:
    """DDP with buckets of an eighth of the bytes that it reduces, but at least 1 MiB, the size of its first bucket.

    The default of 25 MiB is a fortieth of the published Transformer, but more than all gradients of the lab's models,
    so no communication would overlap compute.

    Attributes:
        sparse: tables are `nn.Embedding(sparse=True)`, whose gradients DDP gathers from all ranks.
        compiled: the whole under `torch.compile`, which cuts the graph at DDP's buckets.
    """

    sparse: bool = False
    compiled: bool = False

    def prepare(self, task: Task) -> Training:
        plain = with_sparse_tables(task.model(), self.sparse)
        reduced = [p for name, p in plain.named_parameters() if not (self.sparse and name.startswith("tables."))]
        bucket_mb = sum(p.numel() * p.element_size() for p in reduced) / MIB / BUCKETS
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True, bucket_cap_mb=max(1.0, bucket_mb))
        optimizer = task.make_optimizer(model.parameters())
        return Training(ordinary_steps(torch.compile(model) if self.compiled else model, optimizer))
