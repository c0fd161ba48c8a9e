"""Implements torch's ops for shards of a table: one rule for each op.

    op                                              result
    ----------------------------------------------  ---------------------------------------------------------------
    element-wise, in place or not, fills, copies    applied to this rank's part, and to its share of whole operands
    views: rows, slices, transposed, flattened      a part of the view, sharing memory
    rows written by ids                             this rank writes its columns of them
    rows read by ids                                whole rows; ranks may read different ids
    random fills                                    every rank draws the whole and keeps its share
    sums, means, norms, extremes, any, all          reduced over the ranks if a sharded dimension is reduced
    indices and values of a sparse gradient         the rows that any rank has read, in this rank's columns
    ops that autograd records, and their backward   computed on gathered whole tensors (`shard_whole`)
    all others, and writes into whole tensors       computed on gathered whole tensors
    collectives, and other writes into parts        refused

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

from embrace_fx.runtime.tables.local_storage import CopyStorage, LocalStorage
from embrace_fx.runtime.tables.shard_layout import VIEWS, Axis, Layout, NotAView, apply_view
from embrace_fx.runtime.tables.shard_reductions import REDUCTIONS
from embrace_fx.runtime.tables.shard_rows import ROWS
from embrace_fx.runtime.tables.shard_whole import (
    ALIASES,
    LIKE,
    NEW,
    RANDOM_LIKE,
    as_read_only,
    flatten_call,
    is_recorded,
    run_on_gathered,
    run_recorded,
    set_memory,
)
from embrace_fx.runtime.tables.table_shard import Rule, TableShard

aten = torch.ops.aten


def run_op(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an op that has shards among its arguments, by its implementation for shards.

    Raises:
        RuntimeError: the op is not supported on shards. Raised on every rank.
    """
    leaves = flatten_call(args, kwargs)
    parts = [leaf for leaf in leaves if isinstance(leaf, TableShard)]
    if len(parts) < len(leaves) and DTensor in set(map(type, leaves)):
        raise parts[0].refused(f"{func.overloadpacket.__name__}() with a DTensor argument")
    written = args[0].held if func._schema.is_mutable and isinstance(args[0], TableShard) else None
    if written is not None:
        written.check_write()
    # Treat shards that are whole on this rank as plain tensors.
    if len(parts) > 1 and any(part.spread.is_alone != parts[0].spread.is_alone for part in parts):
        args, kwargs = pytree.tree_map_only(
            TableShard, lambda p: p.held.dense() if p.spread.is_alone else p, (args, kwargs)
        )
        parts = [part for part in parts if not part.spread.is_alone]
    found = _run_rule(func, args, dict(kwargs), parts)
    if written is not None:
        written.record_write()
    if func not in _OF_NO_ELEMENTS:
        parts[0].spread.count_collective_op()
    return found


def _run_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: Sequence[TableShard]) -> Any:
    """Runs an op by its implementation for shards, or on whole tensors gathered from all ranks if it has none.

    Args:
        parts: the shards among the arguments.

    Raises:
        RuntimeError: the op is not supported on shards.
    """
    first = parts[0]
    is_alone = first.spread.is_alone
    summed = True in [part.held.unreduced for part in parts]
    # A `_foreach_` op follows the rule of its single-tensor op.
    if summed and func not in _OF_SUMS and not func._schema.name.startswith("aten::_foreach_"):
        raise first.not_reduced_error(func._schema.name)
    if not is_alone and is_recorded(func, args, kwargs):
        return run_recorded(_RULES.get(func), func, args, kwargs)
    rule = _RULES.get(func)
    if rule is not None and (isinstance(args[0], TableShard | list | tuple) or rule in _OF_TWO):
        try:
            found = rule(func, args, kwargs)
        except NotAView:
            found = NotImplemented
        if found is not NotImplemented:
            return found
    if func._schema.name.startswith("aten::_foreach_"):
        return _foreach(func, args, kwargs)
    if torch.Tag.pointwise in func.tags or func in _ELEMENT_WISE:
        found = _element_wise(func, args, kwargs)
        if found is not NotImplemented:
            return found
    if is_alone:
        return _run_on_whole(func, args, kwargs)
    if isinstance(kwargs.get("out"), TableShard) and torch.Tag.pointwise in func.tags:
        found = _write_out(func, args, kwargs)
        if found is not NotImplemented:
            return found
    if func._can_decompose():  # composite ops reach this point when called below autograd
        return func.decompose(*args, **kwargs)
    return run_on_gathered(func, args, kwargs)


# -- aliases and views -------------------------------------------------------------------------------------------------


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `detach` and `alias`: returns a shard with the same storage."""
    return args[0].like(args[0].held)


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements view ops: returns a shard, or a list of shards, that are views of this rank's shard."""
    part = args[0]
    if func is aten.view.default and torch.Size(args[1]) == part.shape:
        return _alias(func, args, kwargs)
    local, storage_of_view = part.held.memory(), part.held.storage_of_view
    found = apply_view(func, args[1:], kwargs, part.spread, local)
    if isinstance(found, list):
        return [part.like(storage_of_view(own), layout) for layout, own in found]
    layout, own = found
    return part.like(storage_of_view(own), layout)


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
    if common is None:
        return NotImplemented
    layout: Layout = common
    if writes and not layout.fits(parts[0].spread):
        # Run the op without data, so that torch raises its own error.
        func(*pytree.tree_map_only(Tensor, _as_meta, args), **pytree.tree_map_only(Tensor, _as_meta, kwargs))
        return NotImplemented

    def own_values(leaf: Tensor) -> Tensor:
        """Returns this rank's values of an operand."""
        if isinstance(leaf, TableShard):
            local = leaf.held.memory() if writes and leaf is args[0] else leaf.held.dense()
            return local if leaf.spread.is_flat else _own_elements(local, leaf.spread.axes, layout)
        if layout.is_flat:
            return layout.cut(leaf) if leaf.numel() > 1 else leaf
        return _own_elements(leaf, tuple(map(Axis.whole, leaf.shape)), layout)

    plain_args, plain_kwargs = pytree.tree_map_only(Tensor, own_values, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if writes:
        return args[0]
    if not parts[0].spread.is_alone:
        others = [leaf for leaf in leaves if not isinstance(leaf, TableShard)]
        numbers = [leaf for leaf in given if isinstance(leaf, int | float | complex)]
        layout = layout.for_result([part.spread for part in parts], others, numbers)
    if any(not part.spread.meta().is_contiguous() for part in parts):
        looks = func(*pytree.tree_map_only(Tensor, _as_meta, args), **pytree.tree_map_only(Tensor, _as_meta, kwargs))
        stride = pytree.tree_leaves(looks)[0].stride()
        layout = replace(layout, stride=stride)
    return pytree.tree_map_only(Tensor, lambda found: parts[0].like(LocalStorage(found), layout), result)


def _write_out(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements element-wise ops with a shard as `out=`. Returns `NotImplemented` if the result has another shape."""
    out = kwargs["out"]
    found = func.overloadpacket(*args, **{key: value for key, value in kwargs.items() if key != "out"})
    return out.copy_(found) if found.shape == out.shape else NotImplemented


def _as_meta(leaf: Tensor) -> Tensor:
    """Returns a meta tensor with the shape and dtype of `leaf`. For a shard, this is the shape of the whole tensor."""
    if isinstance(leaf, TableShard):
        return leaf.spread.meta(leaf.dtype)
    return leaf.to("meta")


def _common_layout(parts: Sequence[TableShard], leaves: Sequence[Tensor]) -> Layout | None:
    """Returns the layout of an element-wise op's result, or None if its operands are sharded in different layouts.

    Args:
        parts: the operands that are shards.
        leaves: all operands that are tensors.
    """
    first, shape = parts[0].spread, torch.broadcast_shapes(*(leaf.shape for leaf in leaves))
    if any(part.spread.is_flat for part in parts):
        alike = all(part.spread.fits(first) for part in parts)
        plain = [leaf for leaf in leaves if not isinstance(leaf, TableShard)]
        fit = alike and shape == first.shape and all(leaf.numel() == 1 or leaf.shape == shape for leaf in plain)
        return first if fit else None
    if any(part.spread.chosen != first.chosen for part in parts):
        return None
    axes = list(map(Axis.whole, shape))
    for part in parts:
        for dim, axis in enumerate(part.spread.axes, len(shape) - part.dim()):
            if axis.of and (axis.size != shape[dim] or axes[dim].of not in ((), axis.of)):
                return None
            axes[dim] = axis if axis.of or first.chosen else axes[dim]
    return first.with_axes(tuple(axes), first.chosen) if shape != first.shape else replace(first, axes=tuple(axes))


def _own_elements(operand: Tensor, axes: tuple[Axis, ...], layout: Layout) -> Tensor:
    """Returns the elements of an operand that this rank needs to compute its elements of an element-wise op's result.

    Args:
        operand: this rank's elements of a shard, or a whole tensor.
        axes: the dimensions of the operand.
        layout: the layout of the result.
    """
    index = [slice(None)] * len(axes)
    for dim, (axis, wanted) in enumerate(zip(axes, layout.axes[len(layout.axes) - len(axes) :], strict=True)):
        if axis.size == wanted.size and axis.own != wanted.own:
            index[dim] = wanted.index
    return operand[tuple(index)] if any(each != slice(None) for each in index) else operand


def _new_shard(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `clone`, `_to_copy`, `zeros_like` and similar ops: returns a shard of the same layout."""
    part = args[0]
    if func is aten.clone.default and not kwargs:
        return part.like(part.held.copied())
    keeps = kwargs.get("memory_format") in (None, torch.preserve_format)
    found = func(part.held.dense(), *args[1:], **kwargs)
    if keeps:
        return part.like(LocalStorage(found))
    return part.like(LocalStorage(found), replace(part.spread, stride=_as_meta(part).contiguous().stride()))


def _new_plain(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `new_empty` and similar ops: returns a plain tensor with the shard's device and dtype."""
    return func(args[0].held.dense()[:0], *args[1:], **kwargs)


def _random(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements random fills: draws the whole tensor, equal on all ranks, and keeps this rank's elements."""
    part = args[0]
    looks = torch.empty(part.shape, dtype=part.dtype, device=part.device)
    drawn = part.spread.cut(func(looks, *args[1:], **kwargs))
    if not func._schema.is_mutable:
        return part.like(LocalStorage(drawn.clone()))
    local = part.held.memory()
    if local.numel():
        local.copy_(drawn.reshape(local.shape))
    return part


# -- several tensors, and one rank ------------------------------------------------------------------------------------


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


def _run_on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements all other ops, on the plain table, for a rank that has the whole table."""
    shares = func._schema.is_mutable or any(each.alias_info is not None for each in func._schema.returns)

    def plain(part: TableShard) -> Tensor:
        """Returns the whole table as a plain tensor."""
        return part.held.pinned() if shares else part.held.dense()

    plain_args, plain_kwargs = pytree.tree_map_only(TableShard, plain, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if shares and isinstance(args[0], TableShard) and isinstance(args[0].held, CopyStorage):
        return as_read_only(args[0], result, func)
    return args[0] if func._schema.is_mutable and isinstance(args[0], TableShard) else result


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
        **dict.fromkeys(VIEWS, _view),
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
_OF_NO_ELEMENTS = frozenset({*VIEWS, *ALIASES, *NEW})
"""Ops that access no element, which one rank may call alone."""

_OF_SUMS = frozenset(
    {
        *(torch.ops.prim.layout.default, *VIEWS, *ALIASES, *LIKE, *NEW),
        *(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar, aten.zero_.default),
        *(aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.index_put_.default),
        *(aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor, aten.index_copy_.default),
        *(aten.masked_fill_.Scalar, aten.masked_fill_.Tensor),
    }
)
"""Ops linear in the gradient: applying them before or after the sum over ranks is the same."""


_OF_TWO = frozenset({REDUCTIONS[aten.equal.default], set_memory})

TableShard.answer = run_op
