"""Flattens a model's results to a graph's outputs, including tensors inside objects.

A model may return tensors in objects that pytree does not know, such as a key-value cache.

While the forward is traced, `flatten_result` replaces each such object by a pytree node with its attributes.
Unflattening that node creates an object of the same class with the same attributes. The compiled model thus returns the
same objects as the model, and the user's classes are not registered.

A model may also return tensors that share memory: two views of one tensor, or a parameter itself. `flatten_result`
copies them so that each has its own gradient. Autograd would otherwise treat them as one value, or as an input.
"""

from __future__ import annotations

import enum
import types
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from embrace_fx.vocabulary.plain_objects import is_plain_object

_CONSTANTS = (torch.dtype, torch.device, torch.layout, type, enum.Enum, types.FunctionType, types.ModuleType, nn.Module)


@dataclass(frozen=True)
class _FlattenedObject:
    """A pytree node that replaces an object among a forward's results during tracing.

    Attributes:
        kind: the object's class.
        attributes: the object's attributes by name.
    """

    kind: type
    attributes: dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Constant:
    """Wraps a part of a forward's result (`value`) that is the same for every batch, so that the graph need not output
    it.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        # The forward is traced more than once, and the results of the traces are compared. Each trace creates new
        # objects.
        return isinstance(other, _Constant) and type(self.value) is type(other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


def flatten_result(result: Any, inputs: Iterable[Any] = (), *, every: bool = False) -> Any:
    """Flattens a forward's result to a tree of tensors and numbers, with a `_FlattenedObject` in place of each object.

    Args:
        inputs: the forward's arguments and parameters. A result that needs a gradient is copied if it shares memory
            with one of them, or with another result.
        every: whether to also copy results that need no gradient if they share memory.
    """
    return _flatten_objects(
        result, _ids_to_copy(pytree.tree_leaves(_flatten_objects(result, frozenset())), inputs, every)
    )


def _flatten_objects(result: Any, copied: frozenset[int]) -> Any:
    """Replaces the objects in the tree `result` by `_FlattenedObject`s, and copies the tensors whose ids are in
    `copied`.
    """
    return pytree.tree_map(lambda leaf: _flatten_leaf(leaf, copied), result)


def _flatten_leaf(leaf: Any, copied: frozenset[int]) -> Any:
    """Returns a leaf in a form that the graph can output: a tensor (a clone if its id is in `copied`), a number, a
    `_Constant`, or a `_FlattenedObject` for an object with tensors.
    """
    if isinstance(leaf, _CONSTANTS):
        return _Constant(leaf)
    if id(leaf) in copied:
        return leaf.clone()
    if not is_plain_object(leaf):
        return leaf
    if not holds_tensors(leaf, set()):
        return _Constant(leaf)
    return _FlattenedObject(type(leaf), {name: _flatten_objects(value, copied) for name, value in vars(leaf).items()})


def _ids_to_copy(leaves: Iterable[Any], inputs: Iterable[Any], every: bool) -> frozenset[int]:
    """Returns the `id()` of each result that must be copied, because it shares memory with an input or another result.

    Args:
        leaves: the flattened results.
        inputs, every: as for `flatten_result`.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = [_memory_address(each) for each in inputs if isinstance(each, Tensor) and (every or each.requires_grad)]
    count = Counter([*map(_memory_address, tensors), *set(others)])
    return frozenset(id(leaf) for leaf in tensors if (every or leaf.requires_grad) and count[_memory_address(leaf)] > 1)


def _memory_address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage, which is equal for tensors that share it."""
    return int(tensor.untyped_storage()._cdata)


def holds_tensors(value: Any, seen: set[int]) -> bool:
    """Returns whether a value is a tensor or an object with a tensor among its attributes.

    Args:
        seen: ids of the objects visited so far.
    """
    if isinstance(value, Tensor):
        return True
    if isinstance(value, _CONSTANTS) or not is_plain_object(value) or id(value) in seen:
        return False
    seen.add(id(value))
    return any(holds_tensors(leaf, seen) for leaf in pytree.tree_leaves(vars(value)))


def flatten_attributes(object_class: type, attributes: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Flattens an object of class `object_class` for pytree. Returns (the values of its attributes, the context from
    which `rebuild_object` rebuilds it).
    """
    return list(attributes.values()), (object_class, tuple(attributes))


def rebuild_object(values: Any, context: Any) -> Any:
    """Rebuilds an object from the values and the context that `flatten_attributes` has returned, without calling its
    constructor.
    """
    kind, names = context
    made = kind.__new__(kind)
    vars(made).update(zip(names, values, strict=True))
    return made


pytree.register_pytree_node(
    _FlattenedObject,
    lambda opened: flatten_attributes(opened.kind, opened.attributes),
    rebuild_object,
    serialized_type_name="embrace_fx.capture.result_objects.Opened",
)
pytree.register_pytree_node(
    _Constant,
    lambda constant: ([], constant),
    lambda values, constant: constant.value,
    serialized_type_name="embrace_fx.capture.result_objects.Constant",
)
