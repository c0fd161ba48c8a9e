"""What is measured: models at a size that runs on one core, systems, budgets."""

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
    """A model at one size, with its data."""

    def make(self) -> nn.Module: ...

    def batch(self, step: int, rank: int, seed: int) -> tuple[Tensor, ...]: ...


WORKLOADS: Mapping[str, Sized] = {
    "resnet-50": ResidualWorkload((3, 4, 6, 3), batch_size=16, pixels=64),
    "resnet-101": ResidualWorkload((3, 4, 23, 3), batch_size=16, pixels=64),
    "bert": BertWorkload(2_000, 256, 4, 4, 128, batch_size=8, length=128),
    "gpt-2": DecoderWorkload(2_000, 256, 4, 4, batch_size=8, length=128),
    **{f"lab {name}": sizes["lab"] for name, sizes in MODELS.items()},
}
"""Model -> the size at which it is measured."""

QUICK = ("bert", "gpt-2", "resnet-50")
"""Models of the quick form."""

PAPER: Mapping[str, ResidualWorkload | BertWorkload | DecoderWorkload] = {
    "resnet-50, 256 images of 224": ResidualWorkload((3, 4, 6, 3), batch_size=256, pixels=224),
    "BERT-large, 32 x 384": BertWorkload(30_522, 1024, 16, 24, 512, batch_size=32, length=384),
    "GPT-2-large, 8 x 1024": DecoderWorkload(50_257, 1280, 20, 36, batch_size=8, length=1024),
}
"""Model and batch -> its paper's size, for predictions on the meta device."""


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        system: "everything": eager, nothing is given up; "checkpointing": eager, every block; "knapsack": torch's own,
            its partitioner without code generation; "embrace_fx".
        budget: None where the system has none.
    """

    model: str
    system: str
    budget: float | None = None

    @property
    def key(self) -> str:
        return f"{self.model} | {self.system} | {self.budget}"


def cells(models: tuple[str, ...], budgets: tuple[float, ...]) -> list[Cell]:
    """In the order in which they are measured."""
    found = []
    for model in models:
        found += [Cell(model, "everything"), Cell(model, "checkpointing"), Cell(model, "embrace_fx")]
        found += [Cell(model, system, budget) for system in ("knapsack", "embrace_fx") for budget in budgets]
    return found
