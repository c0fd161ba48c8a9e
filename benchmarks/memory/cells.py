"""What is counted: models at a size that runs on one core, systems, budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from benchmarks.memory.decoder import DecoderWorkload
from benchmarks.memory.residual import ResidualWorkload
from benchmarks.models import MODELS
from benchmarks.models.bert import BertWorkload

BUDGETS = (0.9, 0.7, 0.5, 0.4)
"""Of what saving everything takes."""


class Sized(Protocol):
    """A model of one size, with its data."""

    def make(self) -> nn.Module: ...

    def batch(self, step: int, rank: int, seed: int) -> tuple[Tensor, ...]: ...


Workload = ResidualWorkload | BertWorkload | DecoderWorkload

WORKLOADS: Mapping[str, Sized] = {
    "resnet-50": ResidualWorkload((3, 4, 6, 3), batch_size=16, pixels=112),
    "resnet-101": ResidualWorkload((3, 4, 23, 3), batch_size=16, pixels=112),
    "bert": BertWorkload(2_000, 256, 4, 4, 128, batch_size=8, length=128),
    "gpt-2": DecoderWorkload(2_000, 256, 4, 4, batch_size=8, length=128),
    **{f"lab {name}": sizes["lab"] for name, sizes in MODELS.items()},
}
"""Model -> the size at which it is counted: gradients, which no budget saves, are its smaller part."""

PAPER: Mapping[str, Workload] = {
    "resnet-50, 256 images of 224": ResidualWorkload((3, 4, 6, 3), batch_size=256, pixels=224),
    "resnet-101, 256 images of 224": ResidualWorkload((3, 4, 23, 3), batch_size=256, pixels=224),
    "BERT-large, 32 x 384": BertWorkload(30_522, 1024, 16, 24, 512, batch_size=32, length=384),
    "GPT-2-large, 8 x 1024": DecoderWorkload(50_257, 1280, 20, 36, batch_size=8, length=1024),
}
"""Model and batch -> its paper's size, for predictions."""

LARGER: Mapping[str, Workload] = {
    "resnet-50": ResidualWorkload((3, 4, 6, 3), batch_size=8, pixels=112),
    "bert": BertWorkload(2_000, 256, 4, 4, 128, batch_size=8, length=128),
}
"""Models of which larger batches are counted -> the batch that eager mode trains."""

MULTIPLES = (2, 3, 4)
"""How many times as many examples as eager mode holds are tried in the same bytes."""


@dataclass(frozen=True)
class Cell:
    """One measurement: a model under a system and a memory budget.

    Attributes:
        system: one of `SYSTEMS`.
        budget: the memory budget as a fraction or in bytes, or None for a system without one.
    """

    model: str
    system: str
    budget: float | None = None

    @property
    def what(self) -> str:
        return f"{self.system} | {self.budget}"

    @property
    def key(self) -> str:
        return f"{self.model} | {self.what}"


SYSTEMS: Mapping[str, tuple[float | None, ...]] = {
    "everything": (None,),  # eager mode, which saves everything
    "checkpointing": (None,),  # eager mode, with every block checkpointed
    "knapsack": BUDGETS,  # torch's partitioner without code generation
    "embrace_fx": (None, *BUDGETS),  # recomputes
    "offloading": BUDGETS,  # embrace_fx, which recomputes or offloads to a file
}
"""System -> its budgets."""

BLOCKS = ("resnet-50", "resnet-101", "bert", "gpt-2", "lab bert")
"""Models that are a row of blocks, which can be checkpointed one by one."""


def cells(models: tuple[str, ...]) -> list[Cell]:
    """Returns the measurements in the order in which they are made."""
    return [
        Cell(model, system, budget)
        for model in models
        for system, budgets in SYSTEMS.items()
        for budget in budgets
        if system != "checkpointing" or model in BLOCKS
    ]
