"""How long the blocks of the lab's models take on one core: recorded once, kept beside this file.

`python -m benchmarks.lab profile` records anew, in processor time, which other work of the machine hardly touches. Of
each stage, medians: its forward; the gradient of what it reads; and what the gradients of its parameters take beyond
that. Where a kernel makes both gradients whichever is asked for, as oneDNN's LSTM does, each is given half.
"""

from __future__ import annotations

import datetime
import functools
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.device.stages import Stage, stages
from benchmarks.models import MODELS
from benchmarks.models.base import Batch, TableModel

FILE = Path(__file__).with_name("profiles.json")
SIZES = ("lab", "tiny")
REPEATS = 15
MAKES_BOTH = 0.1
"""Of a backward: where parameters add less, its kernel makes all gradients at once."""


@dataclass(frozen=True)
class BlockTimes:
    """The shape of a stage's output, and the stage's times on the device in milliseconds."""

    name: str
    shape: tuple[int, ...]
    forward_ms: float
    data_gradient_ms: float
    weight_gradient_ms: float

    @property
    def total_ms(self) -> float:
        return self.forward_ms + self.data_gradient_ms + self.weight_gradient_ms


@dataclass(frozen=True)
class Profile:
    """A model's stages, in the order of its forward."""

    blocks: tuple[BlockTimes, ...]

    @property
    def compute_ms(self) -> float:
        return sum(block.total_ms for block in self.blocks)


@functools.cache
def _recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def profile_of(model: str, size: str) -> Profile:
    """Returns the recorded profile of a model.

    Raises:
        ValueError: no profile of this model and size has been recorded.
    """
    models = _recorded()["models"]
    if size not in models.get(model, {}):
        raise ValueError(
            f"{FILE.name} has no profile of {model} at size {size}: record it, `python -m benchmarks.lab profile`."
        )
    return Profile(tuple(BlockTimes(**{**each, "shape": tuple(each["shape"])}) for each in models[model][size]))


def record() -> None:
    """Measures all models and writes the file."""
    torch.set_num_threads(1)
    models = {name: {size: [asdict(each) for each in measure(*_made(name, size))] for size in SIZES} for name in MODELS}
    about = {
        "command": "python -m benchmarks.lab profile",
        "device": "one core, processor time, medians of 15",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    FILE.write_text(json.dumps({"about": about, "models": models}, indent=1) + "\n", encoding="utf-8")


def _made(name: str, size: str) -> tuple[TableModel, Batch]:
    torch.manual_seed(0)
    workload = MODELS[name][size]
    return workload.make(), workload.batch(0, 0, 0)


def measure(model: TableModel, batch: Batch) -> list[BlockTimes]:
    """Measures each stage separately, on the values that it reads in a forward of the batch."""
    embeddings, found = model.embeddings(), []
    values = {name: embeddings[table](ids).detach() for name, (table, ids) in model.lookups(*batch).items()}
    for stage in stages(model):
        reads = [values[name].clone().requires_grad_() for name in stage.reads]
        made = stage.call(batch, *reads)
        found.append(BlockTimes(stage.name, tuple(made.shape), *_times_ms(stage, batch, reads, made)))
        values[stage.name] = made.detach()
    return found


def _times_ms(stage: Stage, batch: Batch, reads: Sequence[Tensor], made: Tensor) -> tuple[float, float, float]:
    along = torch.ones_like(made)

    def gradients(of: Sequence[Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(made, tuple(of), along, retain_graph=True) if of else ()

    forward_ms = _median_ms(lambda: stage.call(batch, *reads))
    data_ms, whole_ms = _median_ms(gradients(reads)), _median_ms(gradients([*reads, *stage.parameters]))
    if not stage.parameters:
        return forward_ms, data_ms, 0.0
    if whole_ms - data_ms < MAKES_BOTH * whole_ms:
        return forward_ms, whole_ms / 2, whole_ms / 2
    return forward_ms, data_ms, whole_ms - data_ms


def _median_ms(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(REPEATS + 1):
        began = time.thread_time()
        call()
        taken.append((time.thread_time() - began) * 1e3)
    return median(taken[1:])
