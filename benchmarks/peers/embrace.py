"""embrace_fx: the plain model compiled, its loader read one batch ahead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import embrace_fx
from benchmarks.models.base import Batch
from benchmarks.peers.base import Task, Training


@dataclass(frozen=True)
class EmbraceFx:
    """A schedule of `embrace_fx.compile`, on one of its back ends; strategies are the compiler's where it is "auto"."""

    schedule: Any
    backend: Any = "eager"
    strategy: Any = "auto"

    def prepare(self, task: Task) -> Training:
        plain = task.model()
        optimizer = task.make_optimizer(plain.parameters())
        model = embrace_fx.compile(
            plain, optimizer=optimizer, schedule=self.schedule, backend=self.backend, strategy=self.strategy
        )

        def steps(batches: Iterable[Batch]) -> Iterator[Tensor]:
            for batch in model.lookahead(batches):
                loss = model(*batch)
                loss.backward()
                model.optimizer.step()
                model.optimizer.zero_grad()
                yield loss.detach()
            model.synchronize()

        return Training(steps, model.report, model)
