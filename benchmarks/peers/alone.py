"""No system at all: every rank trains its own model on its own batches. The compute under all communication."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.peers.base import Task, Training, ordinary_steps, with_sparse_tables


@dataclass(frozen=True)
class Alone:
    """Plain PyTorch in a single process. With `sparse`, gradients of tables contain only their rows."""

    sparse: bool

    def prepare(self, task: Task) -> Training:
        model = with_sparse_tables(task.model(), self.sparse)
        return Training(ordinary_steps(model, task.make_optimizer(model.parameters())))
