"""embrace_fx: the plain model compiled, its loader read one batch ahead."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

import embrace_fx
from benchmarks.device.ops import reference
from benchmarks.models.base import Batch
from benchmarks.peers.base import Recorded, Task, Training
from embrace_fx.runtime.launch import launch_queue, profile
from embrace_fx.runtime.probe import pace

STANDSTILL_S = launch_queue.STANDSTILL_S
"""After which classes of communication overtake each other: in slow motion it, too, takes longer."""
SLOW_PROFILE = 2, 2
"""In slow motion, how many steps are not profiled, and how many are: there a step takes seconds, always the same."""


@dataclass(frozen=True)
class EmbraceFx:
    """`embrace_fx.compile`.

    Attributes:
        schedule, backend: its options.
        strategy: its option; of the parameter names in a mapping, "tables.*" are the tables.
        apart: every rank is a group of one: the same step with communication removed.
        route: its option.
    """

    schedule: Any
    backend: Any = "eager"
    strategy: str | Mapping[str, str] = "auto"
    apart: bool = False
    route: Any = None

    def prepare(self, task: Task) -> Training:
        launch_queue.STANDSTILL_S = STANDSTILL_S * task.slow
        if task.slow > 1:
            profile.PROFILED_AFTER, profile.PROFILED = SLOW_PROFILE
            pace.make_reference_work = reference  # measures the pace of the emulated device instead of this rank's core
        plain = task.model()
        optimizer = task.make_optimizer(plain.parameters())
        model = embrace_fx.compile(
            plain,
            optimizer=optimizer,
            schedule=self.schedule,
            backend=self.backend,
            strategy=self.strategy,
            route=self.route,
            process_group=own_group() if self.apart else None,
        )

        def steps(batches: Iterable[Batch]) -> Iterator[Tensor]:
            for batch in model.lookahead(batches):
                loss = model(*batch)
                loss.backward()
                model.optimizer.step()
                model.optimizer.zero_grad()
                yield loss.detach()
            model.synchronize()

        def record(train: Callable[[], None]) -> Recorded:
            """Returns measured and predicted figures, with a picture of the timeline."""
            with model.record():
                train()
            with tempfile.TemporaryDirectory() as folder:
                picture = Path(folder) / "timeline.svg"
                model.timeline.save(picture)
                drawn = picture.read_text(encoding="utf-8")
            schedule = model.schedule
            figures = {
                "measured": asdict(model.timeline.diagnostics()),
                "predicted": asdict(schedule.diagnostics()),
                "source": schedule.source,
                "steps": asdict(schedule.steps),
            }
            return Recorded(figures, drawn)

        if self.apart:
            return Training(steps, model.report)
        return Training(steps, model.report, record, model)


def own_group() -> dist.ProcessGroup:
    """Returns a process group of only this rank. Collective."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own: dist.ProcessGroup = groups[dist.get_rank()]
    return own
