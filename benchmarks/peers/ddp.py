"""DistributedDataParallel: dense, with sparse gradients of the tables (AllGather), and under torch.compile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.base import Task, Training, ordinary_steps, with_sparse_tables


@dataclass(frozen=True)
class Ddp:
    """DDP with its default buckets.

    Attributes:
        sparse: tables are `nn.Embedding(sparse=True)`, whose gradients DDP gathers from all ranks.
        compiled: the whole under `torch.compile`, which cuts the graph at DDP's buckets.
    """

    sparse: bool = False
    compiled: bool = False

    def prepare(self, task: Task) -> Training:
        plain = with_sparse_tables(task.model(), self.sparse)
        model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
        optimizer = task.make_optimizer(model.parameters())
        return Training(ordinary_steps(torch.compile(model) if self.compiled else model, optimizer))
