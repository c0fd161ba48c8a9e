"""What loops do to the state of optimizers between a step and the next call."""

from __future__ import annotations

import copy
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW

from tests.support.scenario import Training, after_each_step, scenario

AVERAGING = partial(AdamW, lr=0.02, eps=1e-3, weight_decay=0.05)
"""In every way of training: its averages are asked for by their names."""


@after_each_step(optimizer=AVERAGING)
def the_optimizer_copied(training: Training, step: int) -> Any:
    found = copy.deepcopy(training.optimizer).state_dict()["state"]
    of_dense = [1, 2, 3, 4]  # indices of dense parameters, in the model's order
    return [(found[k]["exp_avg"], found[k]["step"]) for k in of_dense if k in found]


@after_each_step(optimizer=AVERAGING)
def momentum_reset(training: Training, step: int) -> None:
    if step % 3 == 1:
        for p in training.dense:
            training.optimizer.state[p]["exp_avg"].zero_()


@after_each_step(optimizer=AVERAGING)
def state_read(training: Training, step: int) -> Any:
    return [training.optimizer.state[p]["exp_avg"].clone() for p in training.dense]


@after_each_step(optimizer=AVERAGING)
def state_of_tables_read(training: Training, step: int) -> Any:
    return [training.columns(training.optimizer.state[p]["exp_avg"].clone()) for p in training.tables]


@after_each_step(optimizer=AVERAGING)
def state_emptied(training: Training, step: int) -> None:
    if step == 3:
        training.optimizer.state.clear()


@after_each_step(optimizer=AVERAGING)
def other_state(training: Training, step: int) -> None:
    if step == 3:
        training.optimizer.state = defaultdict(dict)


def _momenta(training: Training) -> list[Any]:
    return [training.optimizer.state[p][key] for p in training.parameters for key in ("exp_avg", "exp_avg_sq")]


@scenario(optimizer=AVERAGING)
def kept_state_halved(training: Training) -> None:
    for number, batch in enumerate(training.batches()):
        held = _momenta(training) if number else []
        training.update(batch)
        for value in held:
            value.mul_(0.5)


@scenario(optimizer=AVERAGING)
def state_that_is_another_whole_one(training: Training) -> None:
    for step, batch in enumerate(training.batches(4)):
        training.update(batch)
        if step == 1:
            state, (rows, width) = training.optimizer.state[training.tables[0]], training.tables[0].shape
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.linspace(0, 1, rows * width).view(rows, width)
