"""Registers DDP's communication hooks: some only set the dtype in which gradients travel; others reduce them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.hooked_buckets import CommHook
from embrace_fx.setup.options import Options

DTYPES: dict[Callable[..., Any], torch.dtype | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
"""Hook that need not be called -> the dtype in which gradients, also of rows, travel; None: their own dtype."""


def register_hook(communicator: Communicator, asked: CommHook, options: Options, begun: bool, registered: str) -> str:
    """Registers a hook, which reduces gradients or sets their dtype on the wire; returns its name.

    Args:
        begun: whether the model has been called.
        registered: the name of the model's hook; "" for none.

    Raises:
        RuntimeError: the model has been called, or has a hook.
        TypeError: the argument is no hook.
        ValueError: rows are rounded; or strategies other than AllReduce are asked for, under which a hook
            would not see all gradients.
    """
    if begun or registered:
        found = "it has been called" if begun else f"{registered} is registered"
        raise RuntimeError(
            f"expected one hook, before the model's first call, in register_comm_hook(), found that {found} already. "
            "Register it after compile(), once."
        )
    if options.rows != "exact":
        raise ValueError(
            "expected rows='exact' with a communication hook, in register_comm_hook(), found "
            f"rows={options.rows!r}: both say how gradients travel. Leave one out."
        )
    hook, state, group = asked.hook, asked.state, communicator.group
    if not callable(hook):
        raise TypeError(
            f"expected a communication hook, which must be callable, in register_comm_hook(), found {hook!r}. Pass "
            "hook(state, bucket) -> Future[Tensor], one of torch.distributed.algorithms.ddp_comm_hooks say."
        )
    of_group = state is None or (isinstance(state, dist.ProcessGroup) and state == group)
    if of_group and any(hook is each for each in DTYPES):
        communicator.gradient_dtype = DTYPES[hook]
        return asked.name
    given, strategies = options.given_plan, options.strategy
    wanted = strategies.values() if isinstance(strategies, Mapping) else [strategies]
    for strategy in [d.strategy for d in given] if given is not None else wanted:
        if strategy not in ("auto", "allreduce", "frozen", "unused", "local"):
            raise ValueError(
                "expected strategy='auto' or 'allreduce' with a communication hook, in register_comm_hook(), found "
                f"{strategy!r}: the hook reduces whole gradients in buckets, tables' included. Leave the strategy out, "
                "or register one of allreduce_hook, fp16_compress_hook, bf16_compress_hook, without a state."
            )
    if options.route == "graph" or options.memory_budget is not None or options.table_memory is not None:
        raise ValueError(
            "expected no route='graph', memory_budget or table_memory with a communication hook, in "
            "register_comm_hook(), found one of them: the forward runs as it is written, on replicas. Leave it out."
        )
    communicator.comm_hook = asked
    return asked.name


def told_of(communicator: Communicator) -> str:
    """Describes, for a report, what the communication hook or rounding does to gradients."""
    if communicator.comm_hook is not None:
        return f"gradients are reduced by {communicator.comm_hook.name}, within the backward\n"
    if communicator.gradient_dtype is None:
        return communicator.rounding.told()
    dtype, error = communicator.gradient_dtype, torch.finfo(communicator.gradient_dtype).eps / 2
    return f"gradients, and rows of them, travel as {dtype}: each is off by up to {error:.1e} of its value\n"
