"""Registers DDP's communication hooks: some only set the dtype of gradients on the wire; others reduce them."""

from __future__ import annotations

from collections.abc import Callable
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
"""Maps each hook that need not be called to the dtype in which gradients, including those of table rows, are sent.
None: the gradients' own dtype.
"""


def register_hook(communicator: Communicator, asked: CommHook, options: Options, begun: bool, registered: str) -> str:
    """Registers a hook as DDP's `register_comm_hook` does, and returns its name. torch's compression hooks only set the
    dtype in which gradients are sent. Any other hook reduces the gradients itself.

    Args:
        communicator: stores the hook or the dtype.
        asked: the hook and its state, as passed by the user.
        options: the options of `compile`.
        begun: whether the model has been called.
        registered: the name of a hook registered before, or "" for none.

    Raises:
        TypeError: the hook is not callable.
        ValueError: the hook cannot be combined with an option of `compile`.
        RuntimeError: the model has been called, or already has a hook.
    """
    if begun or registered:
        found = "the model has been called" if begun else f"{registered} is registered"
        raise RuntimeError(
            f"register_comm_hook(): {found} already. Register one hook, after compile() and before the first call."
        )
    if options.rows != "exact":
        raise ValueError(
            f"register_comm_hook(): the model was compiled with rows={options.rows!r}, but rows= and a hook both "
            "decide in which format gradients are sent. Leave out rows=, or do not register a hook."
        )
    hook, state, group = asked.hook, asked.state, communicator.group
    if not callable(hook):
        raise TypeError(
            f"register_comm_hook(): {hook!r} is not callable. Pass hook(state, bucket) -> Future[Tensor], such as "
            "those of torch.distributed.algorithms.ddp_comm_hooks."
        )
    of_group = state is None or (isinstance(state, dist.ProcessGroup) and state == group)
    if of_group and any(hook is each for each in DTYPES):
        communicator.gradient_dtype = DTYPES[hook]
        return asked.name
    for strategy in options.asked_strategies:
        if strategy not in ("auto", "allreduce", "frozen", "unused", "local"):
            raise ValueError(
                f"register_comm_hook(): the model was compiled with strategy={strategy!r}, but this hook reduces all "
                "gradients whole, including those of tables. Use strategy='auto' or 'allreduce'. Or register "
                "allreduce_hook, fp16_compress_hook or bf16_compress_hook without a state."
            )
    if options.route == "graph" or options.memory_budget is not None or options.table_memory is not None:
        raise ValueError(
            "register_comm_hook(): with this hook, the forward runs eagerly, and tables are not sharded. Compile the "
            "model without route='graph', memory_budget and table_memory."
        )
    communicator.comm_hook = asked
    return asked.name
