"""Tables beyond memory, and what they are compared with: in memory, and in files that are mapped into memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import embrace_fx
from benchmarks.models.base import Batch
from benchmarks.peers.base import Task, Training, ordinary_steps, with_sparse_tables


@dataclass(frozen=True)
class Tiered:
    """`embrace_fx.compile` with `table_memory`.

    Attributes:
        memory: of each table of at least `rows` rows, as `table_memory` has it; None: all of it.
        ahead: batches that the loader runs ahead.
        adamw: in the place of the task's optimizer.
    """

    memory: float | None
    directory: str
    rows: int = 0
    ahead: int = 3
    adamw: bool = True

    def prepare(self, task: Task) -> Training:
        plain = task.model()
        made = torch.optim.AdamW(plain.parameters(), lr=task.learning_rate) if self.adamw else None
        optimizer = made or task.make_optimizer(plain.parameters())
        large = [name for name, table in plain.embeddings().items() if table.num_embeddings >= self.rows]
        asked: dict[str, Any] = {"row_updates": "replay"}
        if self.memory is not None:
            memory = {f"tables.{name}.weight": self.memory for name in large}
            asked = {"table_memory": memory, "spill_to": self.directory}
        model = embrace_fx.compile(plain, optimizer=optimizer, strategy={"tables.*": "alltoall"}, **asked)

        def steps(batches: Iterable[Batch]) -> Iterator[Tensor]:
            for batch in model.lookahead(batches, self.ahead):
                loss = model(*batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss.detach()
            model.synchronize()

        return Training(steps, lambda: str(model.report()), compiled=model)


@dataclass(frozen=True)
class Mapped:
    """DistributedDataParallel with sparse gradients, over tables and optimizer state that files hold."""

    directory: str

    def prepare(self, task: Task) -> Training:
        model = with_sparse_tables(task.model(), sparse=True)
        with tempfile.TemporaryDirectory(dir=self.directory) as folder:  # what is mapped stays there without a name
            for name, table in model.embeddings().items():
                table.weight = nn.Parameter(_in_file(table.weight.detach(), f"{folder}/{name}"))
            optimizer = task.make_optimizer(model.parameters())
            for name, table in model.embeddings().items():
                state = optimizer.state[table.weight]
                for key in [key for key, value in state.items() if value.shape == table.weight.shape]:
                    state[key] = _in_file(state[key], f"{folder}/{name}.{key}")
        trained = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return Training(ordinary_steps(trained, optimizer))


def _in_file(values: Tensor, path: str) -> Tensor:
    Path(path).touch()
    found = torch.from_file(path, shared=True, size=values.numel(), dtype=values.dtype).view(values.shape)
    return found.copy_(values)
