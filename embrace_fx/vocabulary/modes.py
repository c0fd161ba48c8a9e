"""Runs code without the torch modes that are active in the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def outside_of_modes() -> Iterator[None]:
    """Opens a context in which ops run eagerly, without the caller's modes.

    Disables torch function and dispatch modes (fake tensors, proxies, counters, devices), transforms (`vmap`, `grad`),
    tracing by TorchScript, Dynamo and export, autocast, and inference mode. Whether gradients are recorded does not
    change.
    """
    compiler, trace, records = torch.compiler, torch._C._get_tracing_state(), torch.is_grad_enabled()
    flags = compiler._is_compiling_flag, compiler._is_exporting_flag
    # Disable function modes first, because they would intercept the calls below.
    functions = [_pop_mode() for _ in _get_current_function_mode_stack()]
    if trace is not None:  # inside a kernel, even setting the tracing state to its current value may raise
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
