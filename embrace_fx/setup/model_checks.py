"""Checks of one rank's model and optimizers before they are compiled, without the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from embrace_fx.runtime.step.gradient_hooks import has_node_hooks
from embrace_fx.runtime.tables.table_shard import TableShard


def check_model(model: nn.Module, optimizers: Sequence[Any], *, is_called: bool) -> None:
    """Raises `ValueError` if a model cannot be trained with these optimizers.

    Args:
        is_called: whether this is the first call. Unlike in `compile`, all parameters may then be frozen, as those of a
            GAN's discriminator are in some calls.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"compile(): model is {_type_text(model)}, not an nn.Module. To compile a function, call it in the "
            "forward() of an nn.Module that has its parameters."
        )
    if problem := next(_find_problems(model, optimizers, is_called=is_called), None):
        raise ValueError(problem)
    _refuse_shared_memory(model)


def _find_problems(model: nn.Module, optimizers: Sequence[Any], *, is_called: bool) -> Iterator[str]:
    """Yields an error message for each reason why a model cannot be trained with these optimizers.

    Args:
        is_called: whether this is the first call, when all parameters may be frozen.
    """
    kind, hooks = type(model).__name__, [*model._state_dict_pre_hooks.values()]
    # `torch.compile` keeps the model that it wraps as `_orig_mod`.
    by_torch = isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules
    if by_torch or getattr(type(model), "_wraps_a_model", False):
        yield (
            f"compile(): model is a {kind}, which wraps a model already. Pass the model that it wraps: compile() "
            "replaces the wrapper."
        )
    for name, module in model.named_modules():
        if getattr(type(module), "_wraps_a_model", False):
            yield (
                f"compile(): {name} in this {kind} is compiled already. Compile the whole model, with the plain module "
                "in that place."
            )
    for hook in hooks:
        if taken := getattr(hook, "why_not_compiled", ""):
            yield (
                f"compile(): this {kind} cannot be compiled: {taken}. Load its full_state_dict() into a new model, and "
                "compile that."
            )
    own = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            yield (
                f"compile(): optimizer is {_type_text(optimizer)}, not a torch.optim.Optimizer or a sequence of them. "
                "Create it first, for example torch.optim.Adagrad(model.parameters(), lr=0.01)."
            )
        elif not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            yield (
                f"compile(): {type(optimizer).__name__} has no parameter of {kind}, so its steps "
                "would not change the model. Create it with this model's parameters()."
            )
    yield from _find_parameter_problems(model, is_called=is_called)


def _find_parameter_problems(model: nn.Module, *, is_called: bool) -> Iterator[str]:
    """Yields an error message for each problem of a model's parameters.

    Args:
        is_called: whether this is the first call, when all parameters may be frozen.
    """
    kind, hooks = type(model).__name__, [*model._state_dict_pre_hooks.values()]
    if not is_called and not any(parameter.requires_grad for parameter in model.parameters()):
        yield f"compile(): {kind} has no trainable parameter, so there is nothing to train. Call the model itself."
    placed = {id(layout) for hook in hooks for layout in getattr(hook, "layouts", {}).values()}
    named: Any = model.named_parameters()
    for name, parameter in named:
        if not isinstance(parameter, nn.Parameter):
            yield (
                f"The model is called with another tensor in place of {name}, but gradients belong to the model's own "
                "parameters. Pass tensors for all parameters and buffers to functional_call(), or call the plain model."
            )
        if isinstance(parameter, TableShard) and id(parameter.spread) not in placed:
            yield (
                f"{name} is sharded by another compiled model, so this rank has only a shard of it. To use the "
                f"table in several models, keep it whole: compile each with strategy={{{name!r}: 'allreduce'}}. Or "
                "compile one module that contains these models."
            )
        if parameter.requires_grad and has_node_hooks(parameter):
            yield (
                f"compile(): {name} has a hook on the autograd node that accumulates its gradient, but embrace_fx "
                "never runs that node. Use register_post_accumulate_grad_hook(), or step the optimizer after "
                "backward()."
            )


def _type_text(value: object) -> str:
    """Returns the type of a value as text, for an error message."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"{value!r} of type {type(value).__name__}"


def _refuse_shared_memory(model: nn.Module) -> None:
    """Raises `ValueError` if a trainable parameter shares memory with another parameter or a buffer.

    Under DDP, two Parameters on one storage stay equal, because both are written in place. In a compiled model they
    would silently diverge, because a table may be sharded, and parameters may be updated at different times.
    """
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) in (nn.Parameter, Tensor) and tensor.layout == torch.strided and not tensor.is_meta:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    by_storage.pop(0, None)  # address 0 belongs to tensors without elements
    for tensors in by_storage.values():
        for (name, one), (other, another) in combinations(tensors, 2):
            if (one.requires_grad or another.requires_grad) and share_memory(one, another):
                raise ValueError(
                    f"compile(): {name} and {other} are two parameters whose memory "
                    f"{'is the same' if _same_view(one, another) else 'overlaps'}. embrace_fx updates each parameter "
                    "separately, so their values would diverge. Use one Parameter for both before you create the "
                    "optimizer, for example `model.out.weight = model.words.weight`, or clone one of the two."
                )


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns whether tensors `one` and `other` have an element in common.

    >>> table = torch.zeros(4, 6)
    >>> share_memory(table[:, :3], table[:, 3:]), share_memory(table[:, :4], table[:, 3:])
    (False, True)
    """
    return np.shares_memory(_addresses(one), _addresses(other))


def _addresses(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Returns an array whose elements have the same addresses as those of a tensor. Do not read it: the memory may be
    on a GPU.
    """
    size, at = tensor.element_size(), (tensor.data_ptr(), True)
    place = {"version": 3, "data": at, "shape": tuple(tensor.shape), "typestr": f"|V{size}"}
    place["strides"] = tuple(size * stride for stride in tensor.stride())
    return np.asarray(SimpleNamespace(__array_interface__=place))


def _same_view(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same address, shape and strides."""
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())
