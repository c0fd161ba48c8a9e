"""Flattens a model's arguments to a graph's inputs, including tensors inside containers and objects.

Pytree handles containers. A class with tensors in its objects' attributes (a dataclass, a Hugging Face `BatchEncoding`)
is registered with pytree at its first object, so that its tensors become leaves.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from embrace_fx.capture.errors import RefusedError
from embrace_fx.capture.result_objects import flatten_attributes, holds_tensors, rebuild_object
from embrace_fx.vocabulary.plain_objects import is_plain_object

_TAKEN = (
    *(Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.ScriptObject, types.EllipsisType),
)
"""Types of leaves that torch's capture accepts: tensors and constants."""
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""Layouts of tensors that have no strides."""


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Flattens the arguments of a call with pytree. Returns (leaves, tree structure). Calls with equal structures
    return the same structure object.
    """
    leaves = [*args, *kwargs.values()]
    # Usually there are no containers. Skip pytree then, because it makes five Python calls per argument.
    if _IN_NO_CONTAINER.issuperset(map(type, leaves)):
        names = len(args), *kwargs
        spec = _FLAT.get(names)
        if spec is None:
            spec = _FLAT[names] = _shared_spec(pytree.tree_structure((args, kwargs)))
        return leaves, spec
    leaves, spec = pytree.tree_flatten((args, kwargs))
    while closed := {type(leaf): None for leaf in leaves if is_plain_object(leaf) and holds_tensors(leaf, set())}:
        for kind in closed:
            _register_class(kind)
        leaves, spec = pytree.tree_flatten((args, kwargs))
    return leaves, _shared_spec(spec)


_IN_NO_CONTAINER = frozenset({Tensor, int, float, bool, str, type(None)})
_FLAT: dict[Any, pytree.TreeSpec] = {}
_SPECS: dict[pytree.TreeSpec, pytree.TreeSpec] = {}


def _shared_spec(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """Returns one object for all tree structures that equal `spec`, so that they can be compared with `is`."""
    return _SPECS.setdefault(spec, spec)


def _register_class(cls_to_register: type) -> None:
    """Registers a class with pytree, so that flattening finds tensors in its fields or attributes."""
    if dataclasses.is_dataclass(cls_to_register) and all(field.init for field in dataclasses.fields(cls_to_register)):
        pytree.register_dataclass(cls_to_register)
    else:
        name = f"{cls_to_register.__module__}.{cls_to_register.__qualname__}"
        pytree.register_pytree_node(
            cls_to_register,
            lambda value: flatten_attributes(type(value), vars(value)),
            rebuild_object,
            serialized_type_name=name,
        )


def check_arguments(leaves: list[Any], kind: str) -> None:
    """Raises `RefusedError` if an argument cannot be captured: a nested or sparse tensor, or an object with tensors in
    `__slots__`.

    Args:
        leaves: the flattened arguments.
        kind: the model's class name, for the message.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.is_nested:
            raise RefusedError(
                f"{kind}: an argument is a NestedTensor. Pass its values() and offsets() instead, and build the "
                "NestedTensor in forward() with torch.nested.nested_tensor_from_jagged(values, offsets)."
            )
        if isinstance(leaf, Tensor) and leaf.layout in _SPARSE:
            raise RefusedError(
                f"{kind}: an argument is a sparse tensor ({leaf.layout}). Pass its indices and values() as tensors "
                "instead, and build the sparse tensor in forward()."
            )
        if any(isinstance(getattr(leaf, name, None), Tensor) for name in getattr(type(leaf), "__slots__", ())):
            raise RefusedError(
                f"{kind}: an argument of type {type(leaf).__name__} has tensors in __slots__, which capture does not "
                "support. Pass the tensors themselves as arguments, or use a class without __slots__."
            )


def check_read_arguments(leaves: Sequence[Any], kind: str) -> None:
    """Raises `RefusedError` if an argument that the forward reads cannot be an input of a graph.

    Args:
        leaves: the flattened arguments that the forward reads.
        kind: the model's class name, for the message.
    """
    for leaf in leaves:
        if not isinstance(leaf, _TAKEN):
            raise RefusedError(
                f"{kind}: an argument is {_describe(leaf)}, which is not supported. Pass tensors, numbers or "
                "strings, or containers or plain objects of these. Store anything else as an attribute of the model."
            )


def find_shared_memory(written: Collection[int], leaves: Sequence[Any]) -> tuple[int, int] | None:
    """Finds an argument that the forward modifies in place and that shares memory with another argument. Returns the
    indices of both, or None.

    Args:
        written: indices of the arguments that the forward modifies.
        leaves: the flattened arguments.
    """
    for k in written:
        for other, leaf in enumerate(leaves):
            if other != k and isinstance(leaf, Tensor) and _overlap(leaves[k], leaf):
                return k, other
    return None


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Returns whether the memory ranges of tensors `a` and `b` overlap."""
    if not a.numel() or not b.numel() or a.device != b.device:
        return False
    return a.data_ptr() < _end_address(b) and b.data_ptr() < _end_address(a)


def _end_address(tensor: Tensor) -> int:
    """Returns the address after the last element of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _describe(leaf: Any) -> str:
    """Returns the class of `leaf`, an argument, as text for an error message."""
    return f"the class {leaf.__name__}" if isinstance(leaf, type) else f"a {type(leaf).__name__}"


def argument_names(function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, str]:
    """Maps the index of each flattened argument of a forward to Dynamo's name for it, such as `L["ids"]`. Returns an
    empty dict if the names cannot be determined.

    Args:
        function: the forward, unbound.
        args, kwargs: the arguments of the call.
    """
    roots = _roots(function, args, kwargs)
    if not roots:
        return {}
    try:
        paths = [pytree.tree_flatten_with_path(value)[0] for value in (*args, *kwargs.values())]
    except Exception:  # an attribute of the user's object has raised, so its tensors get no names
        return {}
    names = [f"{root}{pytree.keystr(path)}" for root, found in zip(roots, paths, strict=True) for path, _ in found]
    return dict(enumerate(names))


def _roots(function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Returns Dynamo's name for each argument of a forward, not flattened, or an empty list if they have none."""
    code = function.__code__
    taken = code.co_varnames[1 if code.co_argcount else 0 : code.co_argcount]
    more = code.co_varnames[code.co_argcount + code.co_kwonlyargcount] if code.co_flags & inspect.CO_VARARGS else ""
    named = {*taken, *code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]}
    rest = (
        code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(more)]
        if code.co_flags & inspect.CO_VARKEYWORDS
        else ""
    )
    roots = [f"L[{name!r}]" for name in taken[: len(args)]]
    roots += [f"L[{more!r}][{k}]" for k in range(len(args) - len(roots))] if code.co_argcount else []
    if len(roots) < len(args):
        return []
    return roots + [f"L[{name!r}]" if name in named else f"L[{rest!r}][{name!r}]" for name in kwargs]


def owner_of(index: int, function: types.FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns Dynamo's name for the argument of a forward that contains the flattened argument with an index, or "" if
    it has no name. The arguments of this function are those of `argument_names`.
    """
    counts = [pytree.tree_structure(value).num_leaves for value in (*args, *kwargs.values())]
    owners = [root for root, count in zip(_roots(function, args, kwargs), counts, strict=False) for _ in range(count)]
    return owners[index] if index < len(owners) else ""


def constants_read(leaves: Sequence[Any], names: Mapping[int, str], guards: Collection[str]) -> dict[int, Any]:
    """Returns the values of the flattened arguments that a forward reads and that are not tensors, by their index.

    Args:
        leaves: the flattened arguments.
        names: maps the index of an argument to Dynamo's name for it. An argument without a name counts as read.
        guards: names that Dynamo has guarded, because the forward reads them. "L[" stands for all arguments.
    """
    every = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    return {
        k: leaf
        for k, leaf in every.items()
        if k not in names or any(guard == "L[" or names[k] in guard for guard in guards)
    }


def same_constant(one: Any, other: Any) -> bool:
    """Returns whether two non-tensor arguments have the same type and equal values, so that one graph suits both."""
    if one is other or type(one) is not type(other):
        return one is other
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # `==` may not return a bool: for arrays it returns an array
        return False
