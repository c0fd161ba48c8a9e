"""Has torch apply the pending update of a parameter where it takes a tensor without asking the tensor's class.

    tensor.data = parameter    torch.jit.script(function)(parameter)    torch.func.grad(function)(parameter)

None of these calls `__torch_function__`: each would read what the parameter was before the last step.
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
    """Replaces such functions of torch, once, by ones that apply pending updates of their arguments first."""
    takers = (
        *((Tensor, name) for name in ("_make_subclass", "set_")),
        *((nn.Parameter, "__new__"), (torch.jit.ScriptFunction, "__call__")),
        *((eager_transforms, name) for name in ("_wrap_for_grad", "_wrap_functional_tensor")),
        (vmap, "_add_batch_dim"),
    )
    for owner, name in takers:
        function = _applying(getattr(owner, name))
        setattr(owner, name, staticmethod(function) if name in ("_make_subclass", "__new__") else function)
    of_modules = torchscript.create_script_module
    torchscript.create_script_module = _applying(of_modules, lambda module, *_, **__: tuple(module.parameters()))
    data: Any = Tensor.data
    Tensor.data = property(data.__get__, _applying(data.__set__))  # type: ignore[assignment]


def _applying(function: Callable[..., Any], values: Callable[..., Any] = lambda *args, **kwargs: (args, kwargs)) -> Any:
    """Returns a function that applies pending updates, and calls another one.

    Args:
        values: (the arguments) -> what may hold parameters.
    """

    @functools.wraps(function)
    def applying(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # it traces what it is about to call
            apply_pending(values(*args, **kwargs))
        return function(*args, **kwargs)

    return applying
