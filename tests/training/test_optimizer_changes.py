"""Trainings whose optimizer changes on the way: its options, itself, its state, the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import embrace_fx
from tests.support.models import TwoTableLMWorkload
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import SEED, whole, whole_parameters, whole_state

DTYPE = torch.float64
WORKLOAD = TwoTableLMWorkload()
STEPS = 9

Updates = Literal["sweep", "replay"]
Change = Callable[[Any, Optimizer, int], Optimizer]
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__.replace("_", " ")] = function
    return function


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.02, eps=1e-3, weight_decay=0.1)


@change
def other_betas(model: Any, optimizer: Optimizer, step: int) -> Optimizer:
    if step == 4:
        for group in optimizer.param_groups:
            group["betas"] = (0.7, 0.9)
    if step == 6:
        for group in optimizer.param_groups:
            group["betas"] = (0.9, 0.5)  # under which a momentum does not die away: no step can be skipped
    return optimizer


@change
def another_optimizer(model: Any, optimizer: Optimizer, step: int) -> Optimizer:
    if step != 4:
        return optimizer
    del optimizer
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


@change
def an_optimizer_of_other_state(model: Any, optimizer: Optimizer, step: int) -> Optimizer:
    if step == 4:
        if isinstance(model, embrace_fx.CompiledModel):
            model.synchronize()  # state that is read without a state dict
        for group in optimizer.param_groups:
            group["amsgrad"] = True
        for state in optimizer.state.values():
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    return optimizer


@change
def state_loaded_between_backward_and_step(model: Any, optimizer: Optimizer, step: int) -> Optimizer:
    return optimizer  # see below: the loop itself loads it


def _train(rank: int, model: Any, name: str) -> dict[str, Tensor]:
    optimizer = _adamw(model)
    batches = [WORKLOAD.batches(step, rank, SEED) for step in range(STEPS)]
    saved: Any = None
    for step, batch in enumerate(model.lookahead(batches) if hasattr(model, "lookahead") else batches):
        model(*batch).backward()
        if name == "state loaded between backward and step" and step in (3, 5):
            if saved is not None:
                optimizer.load_state_dict(saved)
            saved = _copied(optimizer.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        optimizer = CHANGES[name](model, optimizer, step)
    ends = {n.removeprefix("module."): value for n, value in whole(model.state_dict().items()).items()}
    return ends | whole_state(model.module, optimizer)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    of_each = {
        number: {key: value.clone() if isinstance(value, Tensor) else value for key, value in each.items()}
        for number, each in state["state"].items()
    }
    return {**state, "state": of_each}


def _compare(rank: int, world_size: int) -> list[tuple[tuple[str, str], dict[str, Tensor], dict[str, Tensor]]]:
    found = []
    for name in CHANGES:
        theirs = _train(rank, DistributedDataParallel(WORKLOAD.make(DTYPE, SEED)), name)
        for updates in ("sweep", "replay"):
            compiled = embrace_fx.compile(WORKLOAD.make(DTYPE, SEED), strategy="alltoall", row_updates=updates)
            found.append(((name, updates), _train(rank, compiled, name), theirs))
    return found


@pytest.mark.long
def test_a_training_whose_optimizer_changes_is_ddps() -> None:
    for by_rank in run_ranks(2, _compare):
        for case, found, expected in by_rank:
            assert found.keys() == expected.keys(), case
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=f"{case}, {name}")


# -- another number of ranks -------------------------------------------------------------------------------------------


def _go_on(rank: int, world_size: int, updates: Updates, path: Path, steps: range) -> dict[str, Tensor]:
    model = embrace_fx.compile(WORKLOAD.make(DTYPE, SEED), strategy="alltoall", row_updates=updates)
    optimizer = _adamw(model)
    if steps.start:
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    for step in steps:
        model(*WORKLOAD.batches(step, rank, SEED)).backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpoint = {"model": model.full_state_dict(), "optimizer": embrace_fx.full_state_dict(optimizer)}
    if rank == 0:
        torch.save(checkpoint, path)
    return whole_parameters(model)


@pytest.mark.long
@pytest.mark.parametrize("updates", ["replay", "sweep"])
def test_state_of_another_number_of_ranks_goes_on(updates: Updates, tmp_path: Path) -> None:
    plain = WORKLOAD.make(DTYPE, SEED)
    optimizer = _adamw(plain)
    for step in range(6):
        ranks = 2 if step < 3 else 3
        for rank in range(ranks):
            (plain(*WORKLOAD.batches(step, rank, SEED)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}

    run_ranks(2, _go_on, updates, tmp_path / "checkpoint", range(3))
    for found in run_ranks(3, _go_on, updates, tmp_path / "checkpoint", range(3, 6)):
        assert_same(found, expected, DTYPE)
