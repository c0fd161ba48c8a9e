"""Reductions of sharded tensors, over all elements or along dimensions.

Contract
    A reduction over a sharded dimension is collective: every rank must call it, and gets the whole result as a plain
    tensor. Any other reduction is local and returns a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.tables.gradient_storage import norm_reduction
from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.shard_layout import NotAView, arguments_by_name, without_axes
from embrace_fx.runtime.tables.table_shard import Rule, TableShard

aten = torch.ops.aten
_SUM, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN


@dataclass(frozen=True)
class _Reduction:
    """The arguments of a call of a reduction op such as `sum`.

    Attributes:
        dims: the reduced dimensions.
        keep: whether reduced dimensions stay, with size 1.
        named: all arguments by name.
        count: the number of elements that are reduced to each element of the result.
        dtype: the dtype of the result.
    """

    dims: tuple[int, ...]
    keep: bool
    named: Mapping[str, Any]
    count: int
    dtype: torch.dtype

    @classmethod
    def from_call(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Reduction:
        """Reads the arguments of a call of a reduction op on a shard. Raises as torch does if they are invalid."""
        part, named = args[0], arguments_by_name(func, args[1:], kwargs)
        looks = func(part.spread.meta(part.dtype), *args[1:], **kwargs)
        dim, dims = named.get("dim"), part.dim()
        asked = (dim,) if isinstance(dim, int) else tuple(dim or range(dims))
        asked = tuple(each % max(1, dims) for each in asked)
        count = prod([part.shape[each] if dims else 1 for each in asked])
        return cls(asked, bool(named.get("keepdim")), named, count, looks.dtype)

    def is_over_all(self, part: TableShard) -> bool:
        """Returns whether the reduction is over all dimensions of the sharded tensor `part`."""
        return len(self.dims) == part.dim()


def _reduce_shard(
    part: TableShard, asked: _Reduction, func: Any, reduce_local: Callable[..., Tensor], reduce_op: Any
) -> Tensor:
    """Reduces a sharded tensor over some dimensions: this rank's values first, then over ranks if these dimensions are
    sharded.

    Args:
        reduce_local: function of (values, dims) that reduces this rank's values, keeping dimensions with size 1.

    Returns:
        The whole result, or this rank's shard of it if it is still sharded.
    """
    layout = part.spread
    if layout.is_flat and not asked.is_over_all(part):
        raise NotAView  # the view has merged a sharded dimension with others
    axes, dims = layout.axes, tuple(range(len(layout.axes))) if layout.is_flat else asked.dims
    local = part.held.dense()
    if local.dim() != len(axes):  # a 0-dim view of an element on another rank, or a flat view
        axes_of = [len(axis.own) for axis in axes]
        local = local.reshape(axes_of) if local.numel() == torch.Size(axes_of).numel() else local
    if layout.chosen or any(axes[dim].of for dim in dims):
        own = _reduce_over_ranks(part, local, dims, reduce_local, reduce_op, _op_text(func))
    else:
        own, result = reduce_local(local, dims), without_axes(layout, dims, keep=asked.keep)
        if result.is_sharded:
            return part.like(LocalStorage(own.view([len(axis.own) for axis in result.axes])), result)
    if not asked.keep:
        return own.view(without_axes(layout, dims, keep=False).shape)
    return own.view([1] * part.dim() if layout.is_flat else without_axes(layout, dims, keep=True).shape)


def _reduce_over_ranks(
    part: TableShard,
    local: Tensor,
    dims: tuple[int, ...],
    reduce_local: Callable[..., Tensor],
    reduce_op: Any,
    asked: str,
) -> Tensor:
    """Reduces the shards of all ranks, keeping reduced dimensions with size 1. Collective.

    Args:
        local: this rank's values.
        reduce_local: function of (values, dims) that reduces this rank's values.
        asked: the op's name, for error messages.
    """
    layout = part.spread
    narrow = reduce_local(local.new_ones((1,) * max(1, len(layout.axes))), dims).dtype
    dtype, none = torch.int32 if narrow == torch.bool else narrow, _neutral_value(narrow, reduce_op)
    whole = torch.full(without_axes(layout, dims, keep=True).shape, none, dtype=dtype, device=local.device)
    if local.numel():
        index = tuple(slice(0, 1) if dim in dims else axis.index for dim, axis in enumerate(layout.axes))
        whole[index] = reduce_local(local, dims).to(dtype).view(whole[index].shape)
    if dtype.is_floating_point and reduce_op != _SUM:  # MAX and MIN ignore nan, so reduce nan separately
        no_number, largest_or_least = whole.isnan(), 1 if reduce_op == _MAX else -1
        both = torch.stack([whole.masked_fill(no_number, none), no_number.to(dtype) * largest_or_least])
        whole, flags = part.spread.reduce(both, reduce_op, asked).unbind()
        return whole.masked_fill(flags != 0, float("nan"))
    return part.spread.reduce(whole, reduce_op, asked).to(narrow)


def _op_text(func: Any) -> str:
    """Returns the name of an op, for error messages."""
    name: str = func._schema.name
    return name.removeprefix("aten::").removeprefix("linalg_vector_")


def _transit_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values are sent between ranks, so that half precision is rounded only once."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _neutral_value(dtype: torch.dtype, reduce_op: Any) -> Any:
    """Returns the result of a reduction of no values: 0 for a sum, the lowest or highest value of the dtype for a
    maximum or minimum.
    """
    if reduce_op == _SUM or dtype == torch.bool:
        return int(reduce_op == _MIN)
    if dtype.is_floating_point:
        return float("-inf") if reduce_op == _MAX else float("inf")
    return torch.iinfo(dtype).min if reduce_op == _MAX else torch.iinfo(dtype).max


def _is_of_gradient(part: TableShard, asked: _Reduction) -> bool:
    """Returns whether the op reduces all elements of a table's gradient to a 0-dim tensor."""
    return part.held.of_gradient and asked.is_over_all(part) and not asked.keep


def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `sum`: sums this rank's values, then the sums of all ranks, in a wider dtype than the result's."""
    part, asked = args[0], _Reduction.from_call(func, args, kwargs)
    dtype = _transit_dtype(asked.dtype)
    if _is_of_gradient(part, asked):
        found = part.spread.reduce(aten.sum.default(part.held.values(), dtype=dtype), _SUM, _op_text(func))
    else:
        found = _reduce_shard(part, asked, func, lambda v, dims: v.sum(dims, keepdim=True, dtype=dtype), _SUM)
    return found.to(asked.dtype)


def _count_nonzero(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `count_nonzero`: sums the ranks' counts."""
    rest = (*args[1:], *kwargs.values())
    return _sum(aten.sum.dim_IntList if rest else aten.sum.default, (args[0] != 0, *rest), {})


def _mean(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `mean`: divides the sum over ranks by the number of elements of the whole tensor."""
    asked = _Reduction.from_call(func, args, kwargs)
    total = _sum(aten.sum.dim_IntList, (args[0], list(asked.dims), asked.keep), {"dtype": _transit_dtype(asked.dtype)})
    return (total / max(1, asked.count)).to(asked.dtype)


def _variance(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `var` and `std`: sums squared distances from the mean, then divides by the corrected count."""
    part, asked = args[0], _Reduction.from_call(func, args, kwargs)
    correction, values = asked.named.get("correction"), part.to(_transit_dtype(part.dtype))
    apart = values - values.mean(list(asked.dims), keepdim=True)
    squares = (apart * apart).sum(list(asked.dims), keepdim=asked.keep)
    found = squares / max(0.0, asked.count - (1.0 if correction is None else float(correction)))
    return (found.sqrt() if "std" in func._schema.name else found).to(asked.dtype)


def _min_or_max(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `max`, `min`, `amax`, `amin`, `any` and `all` over the values of all ranks."""
    part, asked, name = args[0], _Reduction.from_call(func, args, kwargs), func._schema.name.removeprefix("aten::")
    reduce_op = _MAX if name in ("max", "amax", "any") else _MIN
    if name in ("any", "all"):
        return _reduce_shard(part, asked, func, lambda v, dims: getattr(v.bool(), name)(dims, keepdim=True), reduce_op)
    extreme = "amax" if reduce_op == _MAX else "amin"
    return _reduce_shard(part, asked, func, lambda v, dims: getattr(v, extreme)(dims, keepdim=True), reduce_op)


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements vector norms. The norm of all elements of a gradient is computed by the gradient's storage, which may
    have only the nonzero rows.
    """
    part = args[0]
    # Fast path for the call that gradient clipping makes.
    if part.held.of_gradient and len(args) < 3 and not kwargs and part.dtype.is_floating_point:
        of_all: Tensor = part.held.norm(float(args[1]) if args[1:] else 2.0).to(part.dtype)
        return of_all
    asked = _Reduction.from_call(func, args, kwargs)
    # Compute in a wider dtype, because the square of 256 overflows in half precision.
    order, wide = float(asked.named["ord"]), _transit_dtype(asked.dtype)
    if part.held.of_gradient and asked.is_over_all(part):
        total: Tensor = part.held.norm(order).to(asked.dtype)
        return total.view([1] * part.dim()) if asked.keep else total
    power, reduce_op = norm_reduction(order)

    def power_sum(values: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Returns the norm of this rank's values along `dims`, raised to the power at which the ranks' results can be
        reduced.
        """
        norm: Tensor = torch.linalg.vector_norm(values, order, dims, keepdim=True, dtype=wide)
        return norm.pow(power)

    found = _reduce_shard(part, asked, func, power_sum, reduce_op)
    return found.pow(1.0 / power).to(asked.dtype)


def _renorm(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `renorm`: scales down slices whose norm exceeds a maximum."""
    part, order, dim, most = args
    func(part.spread.meta(part.dtype), *args[1:])
    others = [each for each in range(part.dim()) if each != dim % part.dim()]
    norms = torch.linalg.vector_norm(part, float(order), others, keepdim=True)
    scale = torch.where(norms > most, most / (norms + 1e-7), torch.ones_like(norms))
    return part.mul_(scale) if func._schema.is_mutable else part * scale


def _dot(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `dot` of two tensors with the same layout: sums the products over ranks. Collective."""
    one, other = args
    if not isinstance(one, TableShard) or not isinstance(other, TableShard) or not one.spread.fits(other.spread):
        return NotImplemented
    return one.spread.reduce(func(one.held.dense().reshape(-1), other.held.dense().reshape(-1)), _SUM, _op_text(func))


def _equal(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `torch.equal`: returns whether the shards are equal on every rank."""
    one, other = args
    if not isinstance(one, TableShard):
        one, other = other, one
    if one.shape != other.shape:
        return False
    if isinstance(other, TableShard) and not one.spread.fits(other.spread):
        return NotImplemented
    theirs = other.held.dense() if isinstance(other, TableShard) else one.spread.cut(other)
    own = torch.equal(one.held.dense(), theirs.reshape(one.held.dense().shape))
    own_number = torch.tensor(int(own), dtype=torch.int32, device=one.device)
    return bool(one.spread.reduce(own_number, _MIN, _op_text(func)).item())


def _unscaled(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements the in-place unscaling of gradients by `GradScaler`. Sets `found_inf` on all ranks if any rank has an
    infinite or NaN gradient.
    """
    gradients, found_inf, inverse_scale = args
    parts = [g for g in gradients if isinstance(g, TableShard)]
    plain = [g for g in gradients if not isinstance(g, TableShard)]
    values = [part.held.values().clone() for part in parts]
    func([*plain, *values], found_inf, inverse_scale)
    for part, changed in zip(parts, values, strict=True):
        part.held.map(lambda _, changed=changed: changed)  # type: ignore[misc]
        part.held.record_write()
    parts[0].spread.reduce(found_inf, _MAX, "" if found_inf.is_cuda else "unscaling")


REDUCTIONS: Mapping[Any, Rule] = MappingProxyType(
    {
        aten.sum.default: _sum,
        aten.sum.dim_IntList: _sum,
        aten.mean.default: _mean,
        aten.mean.dim: _mean,
        aten.count_nonzero.default: _count_nonzero,
        aten.count_nonzero.dim_IntList: _count_nonzero,
        aten.std.correction: _variance,
        aten.var.correction: _variance,
        **dict.fromkeys((aten.max.default, aten.min.default, aten.amax.default, aten.amin.default), _min_or_max),
        **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), _min_or_max),
        **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), _min_or_max),
        aten.linalg_vector_norm.default: _norm,
        aten.renorm_.default: _renorm,
        aten.renorm.default: _renorm,
        aten.dot.default: _dot,
        aten.vdot.default: _dot,
        aten.equal.default: _equal,
        aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    }
)
"""The ops that reduce all elements or a dimension."""
