"""Runs code as torch runs it where no mode is on, inside of whichever modes its caller is in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Context manager: ops run eagerly inside, unseen and unchanged by the caller's modes.

    It leaves modes of functions and of the dispatcher (fake tensors, proxies, counters, devices), transforms (`vmap`,
    `grad`), traces of TorchScript, Dynamo and export, autocast, and inference mode. Gradients stay on or off.
    """
    compiler, trace, records = torch.compiler, torch._C._get_tracing_state(), torch.is_grad_enabled()
    flags = compiler._is_compiling_flag, compiler._is_exporting_flag
    functions = [_pop_mode() for _ in _get_current_function_mode_stack()]  # first, because they see what guards do
    if trace is not None:  # within a kernel it may not even be set to what it is
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    compiler._is_compiling_flag = compiler._is_exporting_flag = False
    try:
        with contextlib.ExitStack() as left:
            if torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
                left.enter_context(_disable_current_modes())
            for guard in (torch._C._DisableFuncTorch, torch._C._DisablePythonDispatcher, torch._C._DisableAutocast):
                left.enter_context(guard())
            left.enter_context(torch.inference_mode(False))
            left.enter_context(torch.set_grad_enabled(records))
            yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = flags
        if trace is not None:
            torch._C._set_tracing_state(trace)  # type: ignore[attr-defined]
        for mode in reversed(functions):
            _push_mode(mode)
