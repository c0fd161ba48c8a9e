"""Steps rows on a device by one kernel, where the class and the tensors are such as the kernels take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from embrace_fx.runtime.kernels import gpu


def step(
    optimizer: Optimizer, options: Mapping[str, Any], local: Tensor, state: Mapping[str, Any], ids: Tensor, rows: Tensor
) -> bool:
    """Steps rows `ids` (K,) of a part (V', d) by their gradients (K, d), with their state but its counters, in place.

    Returns: whether it has; if not, nothing is done.
    """
    kind = type(optimizer)
    if not local.is_cuda or kind not in (SGD, Adagrad, Adam, AdamW, SparseAdam):
        return False
    parts = [part for part in state.values() if isinstance(part, Tensor) and part.dim() > 0]
    if not all(gpu.takes(tensor) for tensor in (local, rows, *parts)):
        return False
    number = float(state["step"]) + 1 if "step" in state else 0.0
    lr, common = options["lr"], {"maximize": options.get("maximize", False)}
    if kind is SGD:
        momentum = state["momentum_buffer"] if options["momentum"] != 0 else None
        names = ("momentum", "weight_decay", "nesterov")
        gpu.sgd_rows(local, momentum, ids, rows, lr=float(lr), **{name: options[name] for name in names}, **common)
    elif kind is Adagrad:
        size = float(lr / (1 + (number - 1) * options["lr_decay"]))
        common |= {"eps": options["eps"], "weight_decay": options["weight_decay"]}
        gpu.adagrad_rows(local, state["sum"], ids, rows, step_size=size, **common)
    else:
        _adam(kind, options, local, state, ids, rows, number)
    return True


def _adam(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    local: Tensor,
    state: Mapping[str, Any],
    ids: Tensor,
    rows: Tensor,
    number: float,
) -> None:
    beta1, beta2 = options["betas"]
    size, rest = options["lr"] / (1 - beta1**number), (1 - beta2**number) ** -0.5
    decay, shrink = options.get("weight_decay", 0.0), 1.0
    if kind is SparseAdam:  # leaves the bias of the second moment out of the term that eps is added to
        size, rest = options["lr"] * math.sqrt(1 - beta2**number) / (1 - beta1**number), 1.0
    elif options["decoupled_weight_decay"]:
        decay, shrink = 0.0, float(1 - options["lr"] * decay)
    gpu.adam_rows(
        local,
        state["exp_avg"],
        state["exp_avg_sq"],
        state["max_exp_avg_sq"] if options.get("amsgrad") else None,
        ids,
        rows,
        step_size=float(size),
        betas=(float(beta1), float(beta2)),
        eps=options["eps"],
        correction=rest,
        weight_decay=decay,
        shrink=shrink,
        maximize=options.get("maximize", False),
    )
