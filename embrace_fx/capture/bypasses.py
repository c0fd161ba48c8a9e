"""Patches the functions of torch that do not call `__torch_function__`, so that they apply pending updates of
parameters first.

    tensor.data = parameter    torch.jit.script(function)(parameter)    torch.func.grad(function)(parameter)

Without this, they would read the parameter's values from before the last step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.jit._recursive as torchscript
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap

from embrace_fx.runtime.tables.pending_parameters import apply_pending


@cache
def close_bypasses() -> None:
    """Patches the functions of torch that bypass `__torch_function__`, so that they first apply delayed optimizer
    updates of the parameters among their arguments. Does nothing after its first call in a process.
    """
    takers = (
        *((Tensor, name) for name in ("_make_subclass", "set_")),
        *((nn.Parameter, "__new__"), (torch.jit.ScriptFunction, "__call__")),
        *((eager_transforms, name) for name in ("_wrap_for_grad", "_wrap_functional_tensor")),
        (vmap, "_add_batch_dim"),
    )
    for owner, name in takers:
        function = _apply_pending_first(getattr(owner, name))
        setattr(owner, name, staticmethod(function) if name in ("_make_subclass", "__new__") else function)
    of_modules = torchscript.create_script_module
    torchscript.create_script_module = _apply_pending_first(
        of_modules, lambda module, *_, **__: tuple(module.parameters())
    )
    data: Any = Tensor.data
    Tensor.data = property(data.__get__, _apply_pending_first(data.__set__))  # type: ignore[assignment]


def _apply_pending_first(
    function: Callable[..., Any], values: Callable[..., Any] = lambda *args, **kwargs: (args, kwargs)
) -> Any:
    """Wraps `function` so that it first applies delayed optimizer updates of the parameters among its arguments.

    Args:
        values: receives the arguments of a call, and returns the values that may contain parameters.
    """

    @functools.wraps(function)
    def applying(*args: Any, **kwargs: Any) -> Any:
        """Applies delayed optimizer updates of parameters among the arguments, then calls the original function."""
        if not torch.compiler.is_dynamo_compiling():  # do nothing while Dynamo traces the call
            apply_pending(values(*args, **kwargs))
        return function(*args, **kwargs)

    return applying
