"""The tensor type of parts, and how a parameter becomes one and the whole again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from embrace_fx.runtime.tables.held import Held
from embrace_fx.runtime.tables.part import Origin, Part
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.part_rules import answer


class TablePart(Part):
    """What a rank holds of a table, of its gradient, of its optimizer's state, or of a view of them."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return answer(func, args, kwargs or {})


def become_part(parameter: nn.Parameter, local: Tensor, layout: Layout, origin: Origin) -> None:
    """Makes a parameter a part, which stays the object that it was to all who hold it."""
    _exchange(parameter, nn.Parameter(TablePart(Held(local), layout, origin), parameter.requires_grad), origin.name)


def become_whole(parameter: nn.Parameter, whole: Tensor, name: str) -> None:
    """The reverse."""
    _exchange(parameter, nn.Parameter(whole, parameter.requires_grad), name)


def _exchange(parameter: nn.Parameter, other: nn.Parameter, name: str) -> None:
    """Exchanges what two parameters are, as `torch.utils.swap_tensors`, whoever holds weak references to them: these
    are references to the objects, which stay.

    Raises:
        RuntimeError: a graph, or another tensor in C++, holds the parameter's memory as it is.
    """
    gradient, parameter.grad = parameter.grad, None
    own = {key: value for key, value in vars(parameter).items() if key not in _OF_A_PART}  # what users have put there
    held = parameter._use_count() - 1  # type: ignore[attr-defined]
    if held and parameter.requires_grad and torch.autograd.graph.get_gradient_edge(parameter).node is not None:
        held = parameter._use_count() - 2  # type: ignore[attr-defined]  # autograd's node of it
    if held > 0:
        raise RuntimeError(
            f"expected no graph to hold the table {name} while it is placed, in a call of the model, found one that "
            f"reads it. Drop losses that were computed from it before, or keep it whole: "
            f"strategy={{{name!r}: 'allreduce'}}."
        )
    parameter.__class__, other.__class__ = other.__class__, parameter.__class__
    parameter.__dict__, other.__dict__ = other.__dict__, parameter.__dict__
    torch._C._swap_tensor_impl(parameter, other)
    vars(parameter).update(own)
    parameter.grad = gradient


_OF_A_PART = ("held", "spread", "origin", "_is_param")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, as a plain one; of one that is no part, all of it."""
    return tensor.held.memory() if isinstance(tensor, Part) else tensor.detach()
