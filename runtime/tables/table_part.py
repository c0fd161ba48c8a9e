"""The tensor type of parts, and how a parameter becomes one and the whole again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from embrace_fx.runtime.tables.held import Held
from embrace_fx.runtime.tables.part import Origin, Part
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.part_rules import answer


class TablePart(Part):
    """One rank's part of a table, of its gradient, of its optimizer's state, or of a view of them."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return answer(func, args, kwargs or {})


def become_part(parameter: nn.Parameter, local: Tensor, layout: Layout, origin: Origin) -> None:
    """Makes a parameter a part, which stays the object that it was to all who hold it."""
    _exchange(parameter, nn.Parameter(TablePart(Held(local), layout, origin), parameter.requires_grad), origin.name)


def become_whole(parameter: nn.Parameter, whole: Tensor, name: str) -> None:
    """Makes a part an ordinary parameter again; the object stays."""
    _exchange(parameter, nn.Parameter(whole, parameter.requires_grad), name)


def _exchange(parameter: nn.Parameter, other: nn.Parameter, name: str) -> None:
    """Exchanges what two parameters are, as `torch.utils.swap_tensors`, whoever holds the parameter besides: a weak
    reference is to the object, which stays, and a graph that reads it as it was refuses to go backward."""
    gradient, parameter.grad = parameter.grad, None
    own = {key: value for key, value in vars(parameter).items() if key not in _OF_A_PART}  # what users have put there
    if parameter.requires_grad and parameter._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(parameter).node.register_prehook(partial(_refuse, name))
    parameter.__class__, other.__class__ = other.__class__, parameter.__class__
    parameter.__dict__, other.__dict__ = other.__dict__, parameter.__dict__
    torch._C._swap_tensor_impl(parameter, other)
    vars(parameter).update(own)
    parameter.grad = gradient


def _refuse(name: str, gradients: object) -> NoReturn:
    raise RuntimeError(
        f"expected a loss that was computed since the table {name} was placed, in backward(), found one from before. "
        "Call the model first, then compute the loss."
    )


_OF_A_PART = ("held", "spread", "origin", "_is_param")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a plain one; of one that is no part, all of it."""
    return tensor.held.memory() if isinstance(tensor, Part) else tensor.detach()
