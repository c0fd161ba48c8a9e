"""The lab's models with an emulated device: tables, lookups and parameters as they are, compute by a profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import benchmarks.device.ops  # noqa: F401  (declares the ops)
from benchmarks.device.profile import BlockTimes, profile_of
from benchmarks.device.stages import Stage, stages
from benchmarks.models.base import Batch, Lookups, TableModel, Workload


class EmulatedBlock(nn.Module):
    """The parameters of a stage, with the times for which it occupies the device."""

    def __init__(self, stage: Stage, times: BlockTimes, slow: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(stage.parameters)
        self.reads = stage.reads
        self.makes_loss = not times.shape
        self.shape = list(times.shape) or [1]  # autograd would take [] for a list of tensors
        self.times_ms = [ms * slow for ms in (times.forward_ms, times.data_gradient_ms, times.weight_gradient_ms)]

    def forward(self, reads: list[Tensor]) -> Tensor:
        made: Tensor = torch.ops.lab.forward(reads, list(self.weights), self.shape, self.times_ms)
        return made.squeeze(0) if self.makes_loss else made


class EmulatedModel(TableModel):
    """A model whose dense part is emulated.

    Args:
        model: the model whose tables and parameters are used.
        times: the times of the model's stages, in order, for batches of the profiled size.
        slow: the factor by which the device is slower than its profile.
    """

    def __init__(self, model: TableModel, times: tuple[BlockTimes, ...], slow: float) -> None:
        super().__init__()
        parts = stages(model)
        names, profiled = [part.name for part in parts], [each.name for each in times]
        if names != profiled:
            raise ValueError(
                f"EmulatedModel: the profile is of {', '.join(profiled)}, but the model has {', '.join(names)}: "
                "record it again, `python -m benchmarks.lab profile`."
            )
        self.blocks = nn.ModuleDict(
            {part.name: EmulatedBlock(part, each, slow) for part, each in zip(parts, times, strict=True)}
        )
        self.tables = model.tables
        for name in [*dict(model.named_children()), *dict(model.named_parameters(recurse=False))]:
            delattr(model, name)  # only `lookups` of the model is needed, which tells which rows a batch reads
        self.reading = model

    def lookups(self, *batch: Tensor) -> Lookups:
        return self.reading.lookups(*batch)

    def loss(self, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        values = dict(rows)
        for name, block in self.blocks.items():
            values[name] = block([values[read] for read in block.reads])  # type: ignore[union-attr]
        return values[name]


@dataclass(frozen=True)
class Emulated:
    """A workload whose model computes on an emulated device, in slow motion."""

    model: str
    size: str
    workload: Workload
    slow: float

    def make(self) -> EmulatedModel:
        return EmulatedModel(self.workload.make(), profile_of(self.model, self.size).blocks, self.slow)

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        return self.workload.batch(step, rank, seed)
