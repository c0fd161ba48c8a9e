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
    """Returns whether a parameter has gradient hooks."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


class NodeHook(partial[Any]):
    """A hook that a compiled model has put on a node of autograd."""


def has_node_hooks(parameter: nn.Parameter) -> bool:
    """Returns whether the node that would accumulate a parameter's gradient, and never runs here, has hooks.

    Hooks of another compiled model that holds the parameter do not count.
    """
    if getattr(parameter, "_in_backward_optimizers", None):  # torch.distributed.optim sets this attribute
        return True
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    handle: Any = node.register_hook(_nothing)  # hooks of a node share one dict, which only a handle shows
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return not all(isinstance(hook, NodeHook) for hook in (hooks or {}).values())


def _nothing(*_: object) -> None:
    """Does nothing, as a hook that is registered only to reach the node's other hooks."""


def hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Returns a gradient after the parameter's own hooks."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def accumulated(parameter: nn.Parameter, gradient: Tensor, there: Tensor | None) -> Tensor:
    """Returns a gradient after the post-accumulate hooks of its parameter, which read and write `.grad`.

    Args:
        gradient: the gradient to reduce: this backward's, plus the sum that backwards under `no_sync` have left.
        there: the other gradients in `.grad`, which the hooks find in the sum.
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
    """Returns the gradient that hooks have left in `.grad`, or None."""
    return parameter.grad


def run_accumulated(parameter: nn.Parameter) -> None:
    """Calls the hooks that find a gradient in `.grad`, if the gradient stays this rank's own."""
    for hook in tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(parameter)
