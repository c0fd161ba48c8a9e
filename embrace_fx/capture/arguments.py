"""What a model is called with, made fit for a graph's inputs: tensors in containers, and in objects.

Pytree knows containers. A class whose objects have tensors in their attributes (a dataclass, a Hugging Face
`BatchEncoding`) is registered with it when the first such object comes; from then on its tensors are leaves.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.capture.errors import RefusedError
from embrace_fx.capture.result_objects import holds_tensors, is_plain_object

_TAKEN = (
    *(Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.ScriptObject, types.EllipsisType),
)
"""Kinds of leaves that torch's captures take: tensors, and constants."""


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """The flattened arguments of a call, and their structure."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    while closed := {type(leaf): leaf for leaf in leaves if not isinstance(leaf, Tensor) and _can_be_opened(leaf)}:
        for kind, leaf in closed.items():
            _register(kind, leaf)
        leaves, spec = pytree.tree_flatten((args, kwargs))
    return leaves, spec


def _can_be_opened(leaf: Any) -> bool:
    return is_plain_object(leaf) and holds_tensors(leaf, set())


def _register(kind: type, example: Any) -> None:
    if dataclasses.is_dataclass(kind) and all(field.init for field in dataclasses.fields(kind)):
        pytree.register_dataclass(kind)
    else:
        pytree.register_pytree_node(kind, _open, _close, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")


def _open(value: Any) -> tuple[list[Any], Any]:
    attributes = vars(value)
    return list(attributes.values()), (type(value), tuple(attributes))


def _close(values: Any, context: Any) -> Any:
    kind, names = context
    made = kind.__new__(kind)
    vars(made).update(zip(names, values, strict=True))
    return made


def check_arguments(leaves: list[Any], kind: str) -> None:
    """Raises where tensors are in forms that no graph takes.

    Args:
        kind: of the model.

    Raises:
        RefusedError: naming the form, and what to pass instead.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise RefusedError(
                f"expected arguments of tensors that are not nested, in a call of {kind}, found a NestedTensor. Pass "
                "its values() and offsets(), and put them together in forward(): "
                "torch.nested.nested_tensor_from_jagged(values, offsets)."
            )
        if isinstance(leaf, Tensor) and leaf.is_sparse:
            raise RefusedError(
                f"expected arguments of dense tensors, in a call of {kind}, found a sparse one. Pass its indices() and "
                "values(), and put them together in forward()."
            )
        if any(isinstance(getattr(leaf, name, None), Tensor) for name in getattr(type(leaf), "__slots__", ())):
            raise RefusedError(
                f"expected arguments of tensors, numbers and texts, in containers or in objects with attributes, in a "
                f"call of {kind}, found a {type(leaf).__name__}, whose tensors are in slots. Pass the tensors."
            )
        if not isinstance(leaf, _TAKEN):
            raise RefusedError(
                f"expected arguments of tensors, numbers and texts, in containers or in objects with attributes, in a "
                f"call of {kind}, found {_spoken(leaf)}. Keep it on the model, as an attribute: another one in its "
                "place is noticed."
            )


def shares_memory(written: Collection[int], leaves: Sequence[Any]) -> tuple[int, int] | None:
    """The first tensor that a forward writes whose memory is another argument's, too, and that other one.

    Args:
        written: indices among `leaves`, the flattened arguments.
    """
    for k in written:
        for other, leaf in enumerate(leaves):
            if other != k and isinstance(leaf, Tensor) and _overlap(leaves[k], leaf):
                return k, other
    return None


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether one's memory, from its first element to its last, has any of the other's."""
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    return a.data_ptr() < _end(b) and b.data_ptr() < _end(a)


def _end(of: Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(of.shape, of.stride(), strict=True))
    return of.data_ptr() + (last + 1) * of.element_size()


def _spoken(leaf: Any) -> str:
    return f"the class {leaf.__name__}" if isinstance(leaf, type) else f"a {type(leaf).__name__}"
