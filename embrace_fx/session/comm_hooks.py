"""DDP's communication hooks: which of them there are here, and what they mean for what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

_DTYPES: dict[Callable[..., Any], torch.dtype | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}


def dtype_of_hook(state: object, hook: Callable[..., Any], group: dist.ProcessGroup | None) -> torch.dtype | None:
    """The dtype in which gradients travel under a hook; None: their own.

    Args:
        group: the ranks that train together, which may also be the hook's state.

    Raises:
        TypeError: no hook.
        ValueError: another hook, or one with another state.
    """
    if not callable(hook):
        raise TypeError(
            f"expected a communication hook, which must be callable, in register_comm_hook(), found {hook!r}. Pass a "
            "function of torch.distributed.algorithms.ddp_comm_hooks.default_hooks."
        )
    if hook not in _DTYPES:
        names, found = ", ".join(each.__name__ for each in _DTYPES), getattr(hook, "__qualname__", hook)
        raise ValueError(
            f"expected one of DDP's hooks {names}, in register_comm_hook(), found {found}: "
            "buckets here are cut into chunks and run into the next step, which other hooks do not know. Register one "
            "of these, or none."
        )
    if state is not None and not (isinstance(state, dist.ProcessGroup) and state == group):
        raise ValueError(
            f"expected no state of {hook.__name__}, in register_comm_hook(), found {type(state).__name__}: gradients "
            "travel in the groups that compile() made. Pass None, and process_group to compile()."
        )
    return _DTYPES[hook]


def told_of(dtype: torch.dtype | None) -> str:
    """What a report says of it."""
    if dtype is None:
        return ""
    error = torch.finfo(dtype).eps / 2
    return f"gradients, and rows of them, travel as {dtype}: each is off by up to {error:.1e} of its value\n"
