"""EmbRace's experiment (ICPP 2022): four models on 4, 8 and 16 GPUs of two clusters, beside four baselines.

Each machine has four GPUs, and 100 Gb/s to the others; batches are those of `benchmarks/models`, size `paper`. What is
published is the best ratio over all of it, and no ratio of one setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import embrace_fx
from benchmarks.models import MODELS
from benchmarks.models.base import on_meta
from embrace_fx.cost.devices import DEVICES, Device

GBIT, GPUS_PER_MACHINE = 100, 4
BYTES_PER_MS = GBIT * 1e9 / 8 / 1e3
CLUSTERS = ("RTX 3090", "RTX 2080")
GPUS = (4, 8, 16)
NAMES = ("lm", "gnmt", "transformer", "bert")
PUBLISHED_BEST, PUBLISHED_ANY = 2.41, 30.66
"""EmbRace over the best of its baselines, at most (abstract); over any of them (the preprint's first version)."""

SYSTEMS: Mapping[str, Mapping[str, Any]] = {
    "embrace": {"strategy": {"tables.*": "alltoall"}, "schedule": "2d"},
    "auto": {"schedule": "2d"},
    "BytePS": {"strategy": {"*": "ps"}, "schedule": "horizontal"},
    "AllReduce": {"strategy": {"*": "allreduce"}, "schedule": "none"},
    "AllGather": {"strategy": {"tables.*": "allgather"}, "schedule": "none"},
    "Parallax": {"strategy": {"tables.*": "ps"}, "schedule": "none"},
}
"""The paper's systems, by what they do to the wire. BytePS orders what it sends, the others do not."""
BASELINES = ("BytePS", "AllReduce", "AllGather", "Parallax")


@dataclass(frozen=True)
class Row:
    """One model on so many GPUs of a cluster: predicted steps, in milliseconds, by system.

    Attributes:
    """

    model: str
    cluster: str
    gpus: int
    step_ms: Mapping[str, float]

    @property
    def best(self) -> str:
        """The fastest baseline."""
        return min((name for name in BASELINES if name in self.step_ms), key=lambda name: self.step_ms[name])

    @property
    def speedup(self) -> float:
        """Its step over EmbRace's."""
        return self.step_ms[self.best] / self.step_ms["embrace"]

    @property
    def over_slowest(self) -> float:
        """The slowest baseline's step over EmbRace's."""
        return max(self.step_ms[name] for name in BASELINES if name in self.step_ms) / self.step_ms["embrace"]


def rows(models: tuple[str, ...] = NAMES, size: str = "paper") -> Iterator[Row]:
    """All settings."""
    for model in models:
        for cluster in CLUSTERS:
            for gpus in GPUS:
                steps = {name: predicted_ms(model, size, DEVICES[cluster], gpus, how) for name, how in SYSTEMS.items()}
                yield Row(model, cluster, gpus, steps)


def predicted_ms(model: str, size: str, device: Device, gpus: int, how: Mapping[str, Any]) -> float:
    """A step, as the cost model and the scheduler foresee it."""
    workload = MODELS[model][size]
    made = on_meta(workload)
    planned = embrace_fx.plan(
        made,
        workload.batch(0, 0, 0),
        world_size=gpus,
        cluster=device.cluster(BYTES_PER_MS, devices_per_machine=GPUS_PER_MACHINE),
        optimizer=torch.optim.Adam(made.parameters()),
        row_updates="lazy",
        **how,
    )
    return planned.schedule.diagnostics().step_ms
