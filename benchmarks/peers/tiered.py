"""Tables beyond memory, and the same in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import embrace_fx
from benchmarks.models.base import Batch
from benchmarks.peers.base import Task, Training


@dataclass(frozen=True)
class Tiered:
    """`embrace_fx.compile` with `table_memory`, under AdamW.

    Attributes:
        memory: the limit of `table_memory` for each table of at least `rows` rows, or None for no limit.
        ahead: the number of batches that the loader reads ahead.
    """

    memory: float | None
    directory: str
    rows: int = 0
    ahead: int = 3

    def prepare(self, task: Task) -> Training:
        plain = task.model()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=task.learning_rate)
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
