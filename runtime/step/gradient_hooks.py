"""Runs the user's gradient hooks on this rank's own gradients, before they are reduced, as under DDP.

`parameter.register_hook` may replace the gradient; `register_post_accumulate_grad_hook` finds it in `.grad`, and what
it leaves there is what is reduced. Neither runs for a parameter that this rank's backward does not reach.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def is_hooked(parameter: Tensor) -> bool:
    """Returns whether a parameter has gradient hooks of the user."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


class NodeHook(partial[Any]):
    """A hook that a compiled model has added to an autograd node."""


def has_node_hooks(parameter: nn.Parameter) -> bool:
    """Returns whether the user has hooked the autograd node that accumulates a parameter's gradient. Hooks of other
    compiled models with the same parameter do not count.
    """
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    handle: Any = node.register_hook(lambda *_: None)  # a handle gives access to the dict of all hooks of the node
    hooks = handle.hooks_dict_ref()
    handle.remove()
    # `torch.distributed.optim` sets this attribute for optimizers that step in the backward.
    steps = bool(getattr(parameter, "_in_backward_optimizers", None))
    return steps or not all(isinstance(hook, NodeHook) for hook in (hooks or {}).values())


def run_tensor_hooks(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Runs a parameter's tensor hooks on a gradient, and returns the gradient that they return."""
    for hook in tuple((parameter._backward_hooks or {}).values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def run_accumulate_hooks(parameter: nn.Parameter, gradient: Tensor, there: Tensor | None) -> Tensor:
    """Runs a parameter's post-accumulate hooks, which read and write `.grad`. Returns the gradient to be reduced.

    Args:
        gradient: the gradient to reduce, which includes gradients from earlier backwards under `no_sync`.
        there: a gradient in `.grad` that is not reduced, or None. Hooks see the sum of both.
    """
    if not getattr(parameter, "_post_accumulate_grad_hooks", None):
        return gradient
    before = parameter.grad
    parameter.grad = gradient.clone() if there is None else there + gradient
    try:
        run_hooks_on_grad(parameter)
        left: Tensor | None = getattr(parameter, "grad", None)  # None if a hook has cleared it
    finally:
        parameter.grad = before
    left = torch.zeros_like(gradient) if left is None else left
    return left if there is None else left - there


def run_hooks_on_grad(parameter: nn.Parameter) -> None:
    """Runs a parameter's post-accumulate hooks on what is in `.grad` now."""
    for hook in tuple((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(parameter)
