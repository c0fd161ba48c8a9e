"""Checks a node's recorded fake value against its op's result, without adding anything to the graph's shape
environment.

Runs a node's op on the recorded values of its inputs. If every node agrees, all values follow from those of the
placeholders, and unchanged nodes need not be run again.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv

from embrace_fx.passes.rewriter import DerivedValue, computing_fakes


def without_recording(mode: FakeTensorMode) -> ExitStack:
    """Opens a context in which ops add no guards or symbols to the shape environment of `mode`."""
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(computing_fakes(mode))
    if mode.shape_env is not None:
        stack.enter_context(mode.shape_env.suppress_guards())
        stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
    return stack


def is_derived(node: fx.Node) -> bool:
    """Returns whether a node's fake value was computed from its inputs' current fake values."""
    derived: DerivedValue | None = node.meta.get("derived")
    return (
        derived is not None
        and derived.value is node.meta.get("val")
        and derived.target is node.target
        and _same(derived.args, node.args)
        and _same(derived.kwargs, node.kwargs)
    )


def is_unchanged(node: fx.Node, verified: Mapping[str, fx.Node]) -> bool:
    """Returns whether `verified` has a node of this name with the same op, equal arguments and the same fake value."""
    twin = verified.get(node.name)
    return (
        twin is not None
        and twin.op == node.op
        and twin.target == node.target
        and "val" in node.meta
        and twin.meta.get("val") is node.meta["val"]
        and _same(twin.args, node.args)
        and _same(twin.kwargs, node.kwargs)
    )


def _same(a: Any, b: Any) -> bool:
    """Returns whether arguments `a` and `b` of a call are equal. Nodes count as equal if their fake values are
    equivalent.
    """
    if isinstance(b, fx.Node):
        return _are_equivalent(a.meta.get("val", a) if isinstance(a, fx.Node) else a, b.meta.get("val", b))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def _are_equivalent(one: Any, other: Any) -> bool:
    """Returns whether `one` and `other` are the same fake value, or tensors with equal properties and no symbolic
    sizes.
    """
    if one is other:
        return True
    form, another = _tensor_properties(one), _tensor_properties(other)
    return form is not None and form == another


def _tensor_properties(value: Any) -> tuple[Any, ...] | None:
    """Returns the properties that distinguish dense fake tensors, or None for other values and for tensors with
    symbolic sizes, whose comparison would add a guard.
    """
    if type(value) is not FakeTensor or value.layout != torch.strided:
        return None
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(size) is int for size in sizes):
        return None
    return value.dtype, value.device, value.requires_grad, value.shape, value.stride(), value.storage_offset()


def find_disagreement(node: fx.Node, module: fx.GraphModule, mode: FakeTensorMode) -> tuple[str, str] | None:
    """Returns (expected value, recorded value) of a node, as text, if they differ in dtype, device, layout or shape;
    otherwise None.

    Call it inside `without_recording(mode)`.
    """
    yields = node.op == "placeholder" or (isinstance(node.target, OpOverload) and bool(node.target._schema.returns))
    if "val" not in node.meta:
        return ('a fake value in meta["val"]', "none") if yields else None
    if node.op == "placeholder":
        return None
    inputs = {value: _recorded(value, module, mode) for value in node.all_input_nodes}
    try:
        derived = _derive_value(node, module, inputs)
    except Exception as error:  # fake kernels may raise any error
        lines = str(error).strip().splitlines() or [""]
        return f"inputs that {node.target} takes", f"{type(error).__name__}: {lines[0]}"
    recorded = node.meta["val"]
    return None if _values_agree(derived, recorded, inputs) else (_describe_value(derived), _describe_value(recorded))


def _recorded(node: fx.Node, module: fx.GraphModule, mode: FakeTensorMode) -> Any:
    """Returns a node's `meta["val"]`, with real tensors converted to fake tensors of `mode`."""
    value = node.meta["val"] if "val" in node.meta else operator.attrgetter(str(node.target))(module)
    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        return mode.from_tensor(value, static_shapes=True)
    return value


def _derive_value(node: fx.Node, module: fx.GraphModule, inputs: Mapping[fx.Node, Any]) -> Any:
    """Computes a node's value by calling its target on the values of its inputs."""
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(module)
    assert callable(node.target)
    return node.target(*map_arg(node.args, inputs.__getitem__), **map_arg(node.kwargs, inputs.__getitem__))


def _values_agree(derived: Any, recorded: Any, inputs: Mapping[fx.Node, Any]) -> bool:
    """Returns whether the computed value of a node (`derived`) and its recorded one agree in dtype, device, layout and
    sizes.

    Data-dependent sizes that the node creates may have other symbols, if these map one to one to data-dependent sizes.

    Args:
        inputs: the values of the node's inputs, whose symbols must be equal.
    """
    a, b = pytree.tree_leaves(derived), pytree.tree_leaves(recorded)
    if [_properties(leaf) for leaf in a] != [_properties(leaf) for leaf in b]:
        return False
    sizes = [pair for x, y in zip(a, b, strict=True) for pair in zip(_sizes(x), _sizes(y), strict=True)]
    if all(x is y or (type(x) is type(y) is int and x == y) for x, y in sizes):
        return True
    known = free_unbacked_symbols(list(inputs.values()))
    renaming: dict[Any, Any] = {}
    for x, y in ((_expression(x), _expression(y)) for x, y in sizes):
        if x not in known and free_unbacked_symbols(x) == {x} and x not in renaming:
            if not free_unbacked_symbols(y) or y in renaming.values():
                return False
            renaming[x] = y
        elif _divided(x.xreplace(renaming) if hasattr(x, "xreplace") else x) != _divided(y):
            return False
    return True


def _properties(leaf: Any) -> tuple[object, ...]:
    """Returns a tensor's dtype, device, layout and number of dimensions. For another value, returns its type, where a
    symbolic number has the type of a plain number.
    """
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.device, leaf.layout, leaf.dim()
    for symbolic, plain in ((torch.SymBool, bool), (torch.SymInt, int), (torch.SymFloat, float)):
        if isinstance(leaf, symbolic | plain):
            return (plain,)
    return (type(leaf),)


def _sizes(leaf: Any) -> tuple[Any, ...]:
    """Returns the sizes of a tensor. For another value, returns the value itself, or () for None."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape)
    return () if leaf is None else (leaf,)


def _expression(size: Any) -> Any:
    """Returns the sympy expression of a symbolic size, or a plain size unchanged."""
    return size.node.expr if isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) else size


def _divided(size: Any) -> Any:
    """Returns the expression of a size with each `n * m // n` replaced by `m`. A view of ids (n, n) has such sizes."""

    def divide(base: Any, divisor: Any) -> Any:
        """Returns `base // divisor` as a quotient if it has no remainder."""
        quotient = (base / divisor).cancel()
        return quotient if quotient.as_numer_denom()[1] == 1 else FloorDiv(base, divisor)

    return size.replace(FloorDiv, divide) if hasattr(size, "xreplace") else size


def _describe_value(value: Any) -> str:
    """Describes a value for an error message: dtype, shape and device of each tensor in it, and its other leaves as
    text.
    """
    leaves = pytree.tree_leaves(value)
    return ", ".join(
        f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}" if isinstance(x, Tensor) else str(x)
        for x in leaves
    )
