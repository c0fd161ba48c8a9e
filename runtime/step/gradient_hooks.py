"""Hooks on parameters' gradients: they see this rank's own, before it is reduced, as under DDP.

`parameter.register_hook` may replace the gradient; `register_post_accumulate_grad_hook` finds it in `.grad`, and what
it leaves there is what is reduced. Neither runs for a parameter that this rank's backward does not reach.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def is_hooked(parameter: Tensor) -> bool:
    """Tells whether a parameter has gradient hooks."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


class NodeHook(partial[Any]):
    """A hook of a compiled model's own on a node of autograd's."""


def has_node_hooks(parameter: nn.Parameter) -> bool:
    """Tells whether the node that would accumulate a parameter's gradient has hooks: it never runs here.

    Those of another compiled model, which holds the parameter too, do not count.
    """
    if getattr(parameter, "_in_backward_optimizers", None):  # torch.distributed.optim's
        return True
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    handle: Any = node.register_hook(_nothing)  # hooks of a node share one dict, which only a handle shows
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return not all(isinstance(hook, NodeHook) for hook in (hooks or {}).values())


def _nothing(*_: object) -> None:
    """Does nothing."""


def hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Returns a gradient as the parameter's own hooks make it."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def accumulated(parameter: nn.Parameter, gradient: Tensor, there: Tensor | None) -> Tensor:
    """Returns a gradient as the hooks leave it that find it in `.grad`, which is then as it was.

    Args:
        gradient: what is to be reduced: this backward's, and what backwards under `no_sync` left.
        there: what `.grad` holds besides, which they find in the sum.
    """
    hooks: dict[int, Callable[[Tensor], None]] | None = getattr(parameter, "_post_accumulate_grad_hooks", None)
    if not hooks:
        return gradient
    before = parameter.grad
    parameter.grad = gradient.clone() if there is None else there + gradient
    try:
        for hook in tuple(hooks.values()):
            hook(parameter)
        left = _left_in(parameter)
    finally:
        parameter.grad = before
    left = torch.zeros_like(gradient) if left is None else left
    return left if there is None else left - there


def _left_in(parameter: nn.Parameter) -> Tensor | None:
    """Reads the gradient that hooks have left in `.grad`, if they have not cleared it."""
    return parameter.grad


def run_accumulated(parameter: nn.Parameter) -> None:
    """Calls the hooks that find a gradient in `.grad`, where it stays this rank's own."""
    for hook in tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(parameter)
