"""Implements torch's ops for shards of a table: one rule for each op.

    op                                              result
    ----------------------------------------------  ---------------------------------------------------------------
    element-wise, in place or not, fills, copies    applied to this rank's part, and to its share of whole operands
    views: rows, and slices of unsharded dimensions a part of the view, sharing memory
    other views                                     a view that gathers the whole tensor when it is read or written
    rows written by ids                             this rank writes its columns of them
    rows read by ids                                whole rows; ranks may read different ids
    random fills                                    every rank draws the whole and keeps its share
    sums, means, norms, extremes, any, all          each rank reduces its part, and the ranks reduce the results
    indices and values of a sparse gradient         the rows that any rank has read, in this rank's columns
    ops that autograd records, and their backward   computed on gathered whole tensors (`shard_whole`)
    all others                                      computed on gathered whole tensors; each rank keeps its part of
                                                    what they write
    collectives                                     refused

Contract
    All ranks decide alike whether an op is refused and whether it communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.shard_layout import Axis, Layout, arguments_by_name, own_elements
from embrace_fx.runtime.tables.shard_reductions import REDUCTIONS
from embrace_fx.runtime.tables.shard_rows import ROWS
from embrace_fx.runtime.tables.shard_whole import (
    ALIASES,
    LIKE,
    NEW,
    RANDOM_LIKE,
    GatheredView,
    flatten_call,
    is_recorded,
    is_view,
    run_on_gathered,
    run_recorded,
    set_memory,
)
from embrace_fx.runtime.tables.table_shard import Rule, TableShard

aten = torch.ops.aten


def run_op(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an op on shards. Raises `RuntimeError`, on every rank, if shards do not support it."""
    leaves = flatten_call(args, kwargs)
    parts = [leaf for leaf in leaves if isinstance(leaf, TableShard)]
    if len(parts) < len(leaves) and DTensor in set(map(type, leaves)):
        raise parts[0].refused(f"{func.overloadpacket.__name__}() with a DTensor argument")
    if len(parts) > 1:
        parts.sort(key=lambda part: part.spread.is_alone)
    written = args[0].held if func._schema.is_mutable and isinstance(args[0], TableShard) else None
    if written is not None:
        written.check_write()
    found = _run_rule(func, args, dict(kwargs), parts)
    if written is not None:
        written.record_write()
    if func not in _OF_NO_ELEMENTS and not is_view(func):
        parts[0].spread.count_collective_op()
    return found


def _run_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Sequence[TableShard]) -> Any:
    """Runs an op on the shards `parts` by its rule, or on whole tensors gathered from all ranks if it has none."""
    # A `_foreach_` op follows the rule of its single-tensor op.
    is_foreach = func._schema.name.startswith("aten::_foreach_")
    summed = True in [part.held.unreduced for part in parts]
    if summed and not (func in _OF_SUMS or is_foreach or is_view(func)):
        raise parts[0].not_reduced_error(func._schema.name)
    is_alone, has_parts = parts[0].spread.is_alone, GatheredView not in [type(part.held) for part in parts]
    rule = _RULES.get(func, _view if is_alone and is_view(func) else None)
    if not (has_parts or func in _OF_VIEWS_TOO):
        rule = None
    if not is_alone and is_recorded(func, args, kwargs):
        return run_recorded(rule, func, args, kwargs)
    if rule is not None and (isinstance(args[0], TableShard | list | tuple) or rule is set_memory):
        found = rule(func, args, kwargs)
        if found is not NotImplemented:
            return found
    if is_foreach:
        return _foreach(func, args, kwargs)
    if has_parts and func is not aten.equal.default and (torch.Tag.pointwise in func.tags or func in _ELEMENT_WISE):
        found = _element_wise(func, args, kwargs)
        if found is not NotImplemented:
            return found
    if not is_alone and func._can_decompose():  # a composite op that is called below autograd
        return func.decompose(*args, **kwargs)
    return run_on_gathered(func, args, kwargs)


# -- aliases and views -------------------------------------------------------------------------------------------------


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `detach` and `alias`: returns a shard with the same storage."""
    return args[0].like(args[0].held)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements views of rows and other slices of a dimension that is not sharded, and all views if this rank has the
    whole table: returns a shard, or a list of shards, that are views of this rank's shard.
    """
    part: TableShard = args[0]
    layout = part.spread
    looks = func(layout.meta(part.dtype), *args[1:], **kwargs)  # raises torch's errors, and computes shapes
    if func is aten.view.default and looks.shape == part.shape:
        return _alias(func, args, kwargs)
    dim = arguments_by_name(func, args[1:], kwargs)["dim"] % part.dim() if func in _SLICES else -1
    if not layout.is_alone and (dim < 0 or layout.axes[dim].of):
        return NotImplemented

    def wrap(one: Tensor, own: Tensor) -> TableShard:
        """Returns the shard that is one of the op's results."""
        axes = tuple(map(Axis.whole, one.shape))
        if not layout.is_alone:
            axes = (*layout.axes[:dim], *axes[dim : dim + one.dim() + 1 - part.dim()], *layout.axes[dim + 1 :])
        spread = replace(layout, shape=one.shape, stride=one.stride(), axes=axes)
        return part.like(part.held.storage_of_view(own), spread)

    found = func(part.held.memory(), *args[1:], **kwargs)
    return wrap(looks, found) if isinstance(looks, Tensor) else list(map(wrap, looks, found))


_SLICES = frozenset(
    {aten.select.int, aten.slice.Tensor, aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default}
)


# -- element by element ------------------------------------------------------------------------------------------------


def _element_wise(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements element-wise ops: applies the op to this rank's elements."""
    given = flatten_call(args, kwargs)
    leaves = [leaf for leaf in given if isinstance(leaf, Tensor)]
    parts = [leaf for leaf in leaves if isinstance(leaf, TableShard)]
    writes = func._schema.is_mutable
    if kwargs.get("out") is not None or (writes and not isinstance(args[0], TableShard)):
        return NotImplemented  # the op would write a part into a whole tensor
    common = _common_layout(parts, leaves)
    if common is None or (writes and not common.fits(parts[0].spread)):
        return NotImplemented
    layout: Layout = common

    def own_values(leaf: Tensor) -> Tensor:
        """Returns this rank's values of an operand."""
        if isinstance(leaf, TableShard):
            local = leaf.held.memory() if writes and leaf is args[0] else leaf.held.dense()
            return own_elements(local, leaf.spread.axes, layout)
        return own_elements(leaf, tuple(map(Axis.whole, leaf.shape)), layout)

    plain_args, plain_kwargs = pytree.tree_map_only(Tensor, own_values, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if writes:
        return args[0]
    others = [leaf for leaf in leaves if not isinstance(leaf, TableShard)]
    numbers = [leaf for leaf in given if isinstance(leaf, int | float | complex)]
    layout = layout.for_result([part.spread for part in parts], others, numbers)
    if any(not part.spread.meta().is_contiguous() for part in parts):
        looks = func(*pytree.tree_map_only(Tensor, _as_meta, args), **pytree.tree_map_only(Tensor, _as_meta, kwargs))
        layout = replace(layout, stride=pytree.tree_leaves(looks)[0].stride())
    return pytree.tree_map_only(Tensor, lambda found: parts[0].like(LocalStorage(found), layout), result)


def _as_meta(leaf: Tensor) -> Tensor:
    """Returns a meta tensor with the shape and dtype of `leaf`. For a shard, this is the shape of the whole tensor."""
    return leaf.spread.meta(leaf.dtype) if isinstance(leaf, TableShard) else leaf.to("meta")


def _common_layout(parts: Sequence[TableShard], leaves: Sequence[Tensor]) -> Layout | None:
    """Returns the layout of an element-wise op's result, or None if its operands, `parts` and whole tensors in
    `leaves`, are sharded in different layouts.
    """
    first, shape = parts[0].spread, torch.broadcast_shapes(*(leaf.shape for leaf in leaves))
    axes = list(map(Axis.whole, shape))
    for part in parts:
        if {axis.of for axis in part.spread.axes if axis.of} != {axis.of for axis in first.axes if axis.of}:
            return None
        for dim, axis in enumerate(part.spread.axes, len(shape) - part.dim()):
            if axis.of and (axis.size != shape[dim] or axes[dim].of not in ((), axis.of)):
                return None
            axes[dim] = axis if axis.of else axes[dim]
    return first.with_axes(tuple(axes)) if shape != first.shape else replace(first, axes=tuple(axes))


def _new_shard(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `clone`, `_to_copy`, `zeros_like` and similar ops: returns a shard of the same layout."""
    part = args[0]
    if func is aten.clone.default and not kwargs:
        return part.like(part.held.copied())
    found = LocalStorage(func(part.held.dense(), *args[1:], **kwargs))
    if kwargs.get("memory_format") in (None, torch.preserve_format):
        return part.like(found)
    return part.like(found, replace(part.spread, stride=_as_meta(part).contiguous().stride()))


def _new_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `new_empty` and similar ops: returns a plain tensor with the shard's device and dtype."""
    return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)


def _random(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements random fills: draws the whole tensor, equal on all ranks, and keeps this rank's elements."""
    part = args[0]
    looks = torch.empty(part.shape, dtype=part.dtype, device=part.device)
    drawn = part.spread.cut(func(looks, *args[1:], **kwargs))
    if not func._schema.is_mutable:
        return part.like(LocalStorage(drawn.clone()))
    part.held.memory().copy_(drawn)
    return part


# -- several tensors ---------------------------------------------------------------------------------------------------


def _foreach(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `_foreach_` ops: applies the op to all plain tensors at once, and to each shard separately."""
    tensors = next(value for value in args if isinstance(value, list | tuple))
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    parts = sorted({k for each in lists for k, value in enumerate(each) if isinstance(value, TableShard)})
    found: list[Any] = [None] * len(tensors)
    one_by_one = partial(func._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)
    for chosen, call in (([k for k in range(len(tensors)) if k not in parts], func), (parts, one_by_one)):

        def items_of(value: Any, chosen: Sequence[int] = chosen) -> Any:
            """Returns the chosen items of a list argument, or any other argument unchanged."""
            is_list = isinstance(value, list | tuple) and len(value) == len(tensors)
            return [value[k] for k in chosen] if is_list else value

        results = (
            call(*map(items_of, args), **{key: items_of(value) for key, value in kwargs.items()}) if chosen else None
        )
        for k, result in zip(chosen, results or (), strict=False):
            found[k] = result
    return None if func._schema.is_mutable else found


_ELEMENT_WISE = frozenset(
    {
        *(aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default),
        *(aten.masked_fill_.Scalar, aten.masked_fill_.Tensor, aten.masked_fill.Scalar, aten.masked_fill.Tensor),
        *(aten.floor_divide.default, aten.floor_divide_.Tensor),
    }
)
"""Element-wise ops that torch does not tag as pointwise."""

_RULES: Mapping[Any, Rule] = MappingProxyType(
    {
        aten.detach.default: _alias,
        aten.alias.default: _alias,
        aten.detach_.default: lambda func, args, kwargs: args[0],
        **dict.fromkeys((*_SLICES, aten.view.default), _view),
        **dict.fromkeys((aten.clone.default, aten._to_copy.default, *LIKE), _new_shard),
        **dict.fromkeys(NEW, _new_plain),
        **dict.fromkeys(
            (
                *(aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.exponential_.default),
                *(aten.log_normal_.default, aten.cauchy_.default, aten.geometric_.default),
                *(aten.random_.default, aten.random_.to, getattr(aten.random_, "from"), *RANDOM_LIKE),
            ),
            _random,
        ),
        aten.set_.source_Tensor: set_memory,
        **REDUCTIONS,
        **ROWS,
    }
)
_OF_NO_ELEMENTS = frozenset({*ALIASES, *NEW})
"""Ops that access no element, which one rank may call alone, as it may views."""
_OF_VIEWS_TOO = _OF_NO_ELEMENTS | {aten.set_.source_Tensor}
"""Ops whose rule is also that of a `GatheredView`."""

_OF_SUMS = frozenset(
    {
        *(torch.ops.prim.layout.default, *ALIASES, *LIKE, *NEW),
        *(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.zero_.default),
        *(aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.index_put_.default),
        *(aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor, aten.index_copy_.default),
        *(aten.masked_fill_.Scalar, aten.masked_fill_.Tensor),
    }
)
"""Ops linear in the gradient: applying them before or after the sum over ranks is the same."""

TableShard.answer = run_op
