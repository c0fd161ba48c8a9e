"""Definitions of optimizers that update rows, exactly and lazily."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from embrace_fx.runtime.tables.own_step import hyperparameters

V, D, STEPS = 11, 5, 20
DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Definition:
    """An optimizer as a user writes it; `bitwise` where torch runs the formula in our order of operations."""

    kind: type[Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    bitwise: bool = True

    def __call__(self, parameter: nn.Parameter) -> Optimizer:
        make: Any = self.kind
        # Copies the options, because schedulers write into lr.
        return make([parameter], **hyperparameters(self.options))

    def __str__(self) -> str:
        return "-".join([self.kind.__name__, *(f"{k}={v}" for k, v in self.options.items())])


EXACT = (
    Definition(SGD, {"lr": 0.1}),
    Definition(SGD, {"lr": 0.1, "maximize": True}),
    Definition(SGD, {"lr": torch.tensor(0.1)}),
    Definition(SGD, {"lr": 0.1, "dampening": 0.5}),
    Definition(SGD, {"lr": 0.1, "fused": True}, bitwise=False),
    Definition(Adagrad, {"lr": 0.1}),
    Definition(Adagrad, {"lr": torch.tensor([0.1]), "lr_decay": 0.01}),
    Definition(Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "eps": 1e-3}),
    Definition(Adagrad, {"lr": 0.1, "maximize": True}),
    Definition(Adagrad, {"lr": 0.1, "fused": True}, bitwise=False),
    Definition(SparseAdam, {"lr": 0.01}),
    Definition(SparseAdam, {"lr": torch.tensor(0.01), "betas": (0.8, 0.9), "eps": 1e-3, "maximize": True}),
)

LAZY = (
    Definition(SGD, {"lr": 0.1, "momentum": 0.9}),
    Definition(SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True, "maximize": True}),
    Definition(SGD, {"lr": torch.tensor(0.1), "weight_decay": 0.01}),
    Definition(SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}, bitwise=False),
    Definition(Adagrad, {"lr": 0.1, "weight_decay": 0.01}),
    Definition(Adam, {"lr": 0.01}),
    Definition(Adam, {"lr": torch.tensor(0.01), "betas": (0.8, 0.9), "eps": 1e-3, "maximize": True}),
    Definition(Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    Definition(Adam, {"lr": 0.01, "betas": (0.0, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True}),
    Definition(Adam, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}, bitwise=False),
    Definition(Adam, {"lr": 0.01, "fused": True}, bitwise=False),
    Definition(AdamW, {"lr": 0.01}),
    Definition(AdamW, {"lr": torch.tensor(0.01), "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    Definition(AdamW, {"lr": 0.01, "fused": True}, bitwise=False),
)
