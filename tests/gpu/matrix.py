"""The product of what a training on devices can be: models, optimizers, precisions, schedules, numbers of devices.

A case trains on one device for each rank, over NCCL, and is compared with one process that trains the plain model on
the batches of all ranks: in float32 on the CPU; under autocast on a device, whose types are not the CPU's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import embrace_fx
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from embrace_fx.vocabulary.schedule import SCHEDULES, ScheduleName
from tests.support.models import MODELS, Workload
from tests.support.pairwise import pairwise
from tests.support.question_answering import QuestionAnsweringWorkload
from tests.support.ranks import run_ranks
from tests.support.training import SEED, whole

STEPS = 14
"""Beyond the twelfth, from which on the order follows a profile of the device."""

WORKLOADS: dict[str, Workload] = {
    "lstm": dict(MODELS)["two_table_lm"],
    "transformer": dict(MODELS)["transformer_encoder"],
    "bert": QuestionAnsweringWorkload(),
    "recommender": dict(MODELS)["bag_recommender"],
    "tied decoder": dict(MODELS)["tied_lm"],
}

OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Optimizer], RowUpdatesOption]] = {
    "sgd": (lambda model: SGD(model.parameters(), lr=0.1), "exact"),
    "adagrad": (lambda model: Adagrad(model.parameters(), lr=0.05, eps=1e-3), "exact"),
    "adamw, swept": (lambda model: AdamW(model.parameters(), lr=0.01, weight_decay=0.05, eps=1e-3), "sweep"),
    "adamw, replayed": (lambda model: AdamW(model.parameters(), lr=0.01, weight_decay=0.05, eps=1e-3), "replay"),
}

BOUNDS = {"float32": 2e-5, "bfloat16": 2e-2, "float16, scaled": 5e-3}
"""By precision: how far a parameter may be from the reference's, over its largest value. Under autocast ranks round
what one process rounds in another order: some units of a type's precision, or `ROUNDED` times what rounding does to the
reference itself, where that is more."""

ROUNDED = 3.0
"""How far a training may be from one that rounds otherwise, over how far that one is from itself in a wider type."""

DEVICES = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    devices: int
    schedule: ScheduleName
    model: str
    optimizer: str
    precision: str

    def __str__(self) -> str:
        return f"{self.devices} x {self.model}, {self.optimizer}, {self.precision}, {self.schedule}"


VALUES: dict[str, tuple[Any, ...]] = {
    "devices": DEVICES,
    "schedule": SCHEDULES,
    "model": tuple(WORKLOADS),
    "optimizer": tuple(OPTIMIZERS),
    "precision": tuple(BOUNDS),
}
PAIRWISE = [Case(**each) for each in pairwise(VALUES)]
"""Cases in which any two values of two properties occur together."""


def _precision(precision: str, device: str) -> tuple[AbstractContextManager[None], torch.amp.GradScaler]:
    dtype = precision.partition(",")[0]
    scaler = torch.amp.GradScaler(device, enabled="scaled" in precision, init_scale=1024.0)
    rounds = dtype not in ("float32", "float64")
    return torch.autocast(device, getattr(torch, dtype)) if rounds else nullcontext(), scaler


def trains(rank: int, world_size: int, case: Case) -> dict[str, Tensor]:
    """Returns the parameters, on the CPU, after training on the rank's device."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    workload, (make_optimizer, row_updates) = WORKLOADS[case.model], OPTIMIZERS[case.optimizer]
    model = workload.make(torch.float32, seed=SEED + rank).to(device)
    optimizer = make_optimizer(model)
    compiled = embrace_fx.compile(
        model,
        optimizer=optimizer,
        process_group=dist.new_group(backend="nccl") if world_size > 1 else None,
        strategy="alltoall",
        schedule=case.schedule,
        row_updates=row_updates,
    )
    autocast, scaler = _precision(case.precision, "cuda")
    batches = [tuple(each.to(device) for each in workload.batches(step, rank, SEED)) for step in range(STEPS)]
    for batch in compiled.lookahead(batches):
        with autocast:
            loss = compiled(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    shown = compiled.state_dict()
    parameters = whole((name, shown[name]) for name, _ in compiled.named_parameters())
    return {name: value.cpu() for name, value in parameters.items()}


def reference(rank: int, world_size: int, case: Case) -> dict[str, Tensor]:
    """The parameters of the plain model, trained by one process on the batches of all ranks."""
    device = "cpu" if case.precision in ("float32", "float64") else "cuda"
    dtype = torch.float64 if case.precision == "float64" else torch.float32
    workload, (make_optimizer, _) = WORKLOADS[case.model], OPTIMIZERS[case.optimizer]
    model = workload.make(torch.float32, seed=SEED).to(device, dtype)
    optimizer = make_optimizer(model)
    autocast, scaler = _precision(case.precision, device)
    for step in range(STEPS):
        for of_rank in range(case.devices):
            batch = [each.to(device) for each in workload.batches(step, of_rank, SEED)]
            with autocast:
                loss = model(*(each.to(dtype) if each.is_floating_point() else each for each in batch))
            (scaler.scale(loss) / case.devices).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {name: value.detach().cpu() for name, value in model.named_parameters()}


@dataclass(frozen=True)
class Distance:
    """The largest difference between a rank's parameter and the reference, relative to its largest value."""

    found: float
    allowed: float

    @property
    def is_right(self) -> bool:
        return self.found <= self.allowed


def farthest(case: Case, timeout_s: float = 400.0) -> Distance:
    """Trains, and measures the distance from the reference.

    Raises:
        RankError: a rank fails.
        AssertionError: the training has other parameters, or has not moved some.
    """
    expected = _expected(replace(case, schedule="none"), timeout_s)
    wider = "float64" if case.precision == "float32" else "float32"
    unrounded = _expected(replace(case, schedule="none", precision=wider), timeout_s)
    allowed = max(BOUNDS[case.precision], ROUNDED * _apart(expected, unrounded))
    before = dict(WORKLOADS[case.model].make(torch.float32, seed=SEED).named_parameters())
    still = [name for name, value in expected.items() if torch.equal(before[name], value)]
    assert all(name.endswith("bias") for name in still), still  # a softmax cancels some biases, such as a key's
    ranks = run_ranks(case.devices, trains, case, timeout_s=timeout_s)
    return Distance(max(_apart(of_rank, expected) for of_rank in ranks), allowed)


@functools.cache
def _expected(case: Case, timeout_s: float) -> dict[str, Tensor]:
    """Returns the reference parameters, which are the same for every schedule."""
    expected: dict[str, Tensor]
    (expected,) = run_ranks(1, reference, case, timeout_s=timeout_s)
    return expected


def _apart(parameters: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert list(parameters) == list(expected)
    found = [float((parameters[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()]
    return max(math.inf if math.isnan(each) else each for each in found)
