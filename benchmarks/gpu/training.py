"""Systems that train a lab model on a device: prepared once, then measured window by window, in turn."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import Device
from benchmarks.models.base import Batch, Workload
from benchmarks.peers.alone import Alone
from benchmarks.peers.base import Peer, Task, Training, ordinary_steps
from benchmarks.peers.ddp import Ddp
from benchmarks.peers.embrace import EmbraceFx
from embrace_fx import CompiledModel

BATCHES = 8
"""Batches that are made beforehand and moved to the device, and trained on again and again."""


@dataclass(frozen=True)
class TorchCompiled:
    """The plain model under `torch.compile`, in a single process."""

    def prepare(self, task: Task) -> Training:
        model = task.model()
        return Training(ordinary_steps(torch.compile(model), task.make_optimizer(model.parameters())))


SYSTEMS: Mapping[str, Peer] = {
    "eager": Alone(sparse=False),
    "eager sparse": Alone(sparse=True),
    "torch.compile": TorchCompiled(),
    "ddp": Ddp(),
    "ddp sparse": Ddp(sparse=True),
    "embrace eager": EmbraceFx("2d"),
    "embrace inductor": EmbraceFx("2d", "inductor"),
    **{f"embrace {name}": EmbraceFx(name, strategy="alltoall") for name in ("none", "horizontal", "vertical", "2d")},
}


class Running:
    """A system that trains one model.

    Args:
        system: a name of `SYSTEMS`, or another one.
        rank: the rank whose batches it trains on.
        on_host: whether the model is created on the CPU and then moved, so that every device has the same parameters.
    """

    def __init__(
        self, device: Device, system: str | Peer, workload: Workload, rank: int = 0, on_host: bool = False
    ) -> None:
        self._device = device
        batches = [_moved(workload.batch(step, rank, 0), device) for step in range(BATCHES)]
        task = _OnDevice(workload, device=device.torch, made_on_host=on_host)
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the results show what warnings would say
            self._training = (SYSTEMS[system] if isinstance(system, str) else system).prepare(task)
        self._steps: Iterator[Tensor] = self._training.steps(itertools.cycle(batches))
        self.losses: list[Tensor] = []
        self.step()
        device.synchronize()
        self.first_step_s = time.perf_counter() - start

    def step(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.losses.append(next(self._steps))

    def window_ms(self, steps: int) -> float:
        """Runs this many steps in a row, and returns the mean time of a step."""
        self._device.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._device.synchronize()
        return (time.perf_counter() - start) * 1e3 / steps

    @property
    def compiled(self) -> CompiledModel:
        assert self._training.compiled is not None
        return self._training.compiled

    def overlap(self, steps: int) -> dict[str, Any]:
        """Records a few steps, and returns the metrics of their timeline. These steps are not part of other
        measurements.
        """
        with self.compiled.record():
            for _ in range(steps):
                self.step()
            self._device.synchronize()
        found = self.compiled.timeline.diagnostics()
        lanes = {lane: ms for lane, ms in found.communication_ms.items() if ms}
        return {
            "overlap": found.overlap_ratio,
            "communication_ms": lanes,
            "exposed_ms": found.exposed_ms,
            "hidden": {lane: 1 - found.exposed_ms[lane] / ms for lane, ms in lanes.items()},
        }

    def close(self) -> None:
        """Applies pending updates."""
        if self._training.compiled is not None:
            self._training.compiled.synchronize()


@dataclass(frozen=True)
class _OnDevice(Task):
    device: Any = None
    made_on_host: bool = False

    def model(self) -> Any:
        with torch.device("cpu") if self.made_on_host else self.device:
            made = super().model()
        return made.to(self.device)


def _moved(batch: Batch, device: Device) -> Batch:
    return tuple(tensor.to(device.torch) for tensor in batch)


def take_turns(running: Mapping[str, Running], steps: int, rounds: int) -> dict[str, list[float]]:
    """Returns system -> milliseconds of a step in each round. The systems take turns, in alternating order."""
    found: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(rounds):
        for name in list(running) if turn % 2 == 0 else reversed(list(running)):
            found[name].append(running[name].window_ms(steps))
    return found
