"""DDP's communication hooks: which of them there are here, and what they mean for what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

_DTYPES: dict[Callable[..., Any], torch.dtype | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}


def dtype_of_hook(state: object, hook: Callable[..., Any]) -> torch.dtype | None:
    """The dtype in which gradients travel under a hook; None: their own.

    Raises:
        ValueError: another hook, or one with a state.
    """
    if hook not in _DTYPES:
        names, found = ", ".join(each.__name__ for each in _DTYPES), getattr(hook, "__qualname__", hook)
        raise ValueError(
            f"expected one of DDP's hooks {names}, in register_comm_hook(), found {found}: "
            "buckets here are cut into chunks and run into the next step, which other hooks do not know. Register one "
            "of these, or none."
        )
    if state is not None:
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
