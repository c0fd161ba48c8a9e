"""Reductions of sharded tensors, over all elements or along dimensions.

Contract
    A reduction is collective: every rank must call it, and gets the whole result as a plain tensor. Each rank reduces
    its own part, then the ranks gather the results and reduce them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.tables.shard_layout import arguments_by_name
from embrace_fx.runtime.tables.table_shard import Rule, TableShard

aten = torch.ops.aten


def _reduce(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `sum`, `max`, `min`, `amax`, `amin`, `any`, `all` and vector norms."""
    part, given, dims, looks = _read_call(func, args, kwargs)
    held: Any = part.held
    if not part.numel():
        return NotImplemented
    name = func._schema.name.removeprefix("aten::").removeprefix("linalg_")
    over_all, order = len(dims) == part.dim(), float(given.get("ord", 0))
    if held.of_gradient and over_all and name == "vector_norm":
        total: Tensor = held.norm(order).to(looks.dtype)  # shared with the norms of other gradients
        return total.view(looks.shape)
    # Compute in a wider dtype, because the square of 256 overflows in half precision.
    wide = {"dtype": _wide(looks.dtype)} if name in ("sum", "vector_norm") else {}
    reduce: Any = torch.linalg.vector_norm if name == "vector_norm" else getattr(torch, _BY_DIMENSION.get(name, name))

    def reduced(values: Tensor, keep: bool, order: float) -> Tensor:
        """Reduces this rank's values, or the results of all ranks."""
        found: Tensor = reduce(values, *((order,) if "ord" in given else ()), dims, keepdim=keep, **wide)
        return found

    layout = part.spread.with_axes(
        tuple(axis.reduced() if dim in dims else axis for dim, axis in enumerate(part.spread.axes))
    )
    local = held.values() if name == "sum" and over_all else held.dense()  # zero rows add nothing to a sum
    if all(len(axis.own) for axis in layout.axes):
        local = reduced(local, True, order)
    else:  # this rank has no elements
        local = local.new_empty([len(axis.own) for axis in layout.axes]).to(wide.get("dtype", looks.dtype))
    everyone = layout.whole(local, name.removeprefix("vector_"))
    return reduced(everyone, bool(given.get("keepdim")), order or 1.0).to(looks.dtype)  # norms of order 0 are counts


_BY_DIMENSION = {"max": "amax", "min": "amin"}


def _read_call(
    func: Any, args: Any, kwargs: Mapping[str, Any]
) -> tuple[TableShard, dict[str, Any], tuple[int, ...], Tensor]:
    """Reads a call of a reduction. Raises as torch does if the arguments are invalid. Returns the reduced shard, the
    other arguments by name, the reduced dimensions, and a meta tensor like the result.
    """
    part, given = args[0], arguments_by_name(func, args[1:], kwargs)
    looks = func(part.spread.meta(part.dtype), *args[1:], **kwargs)
    dim = given.get("dim")
    asked = (dim,) if isinstance(dim, int) else tuple(dim or range(part.dim()))
    return part, given, tuple(each % max(1, part.dim()) for each in asked), looks


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which values are sent between ranks, so that half precision is rounded only once."""
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _mean(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `mean`: divides the sum over ranks by the number of elements of the whole tensor."""
    part, given, dims, looks = _read_call(func, args, kwargs)
    total = part.sum(dims, keepdim=bool(given.get("keepdim")), dtype=_wide(looks.dtype))
    return (total / (part.numel() / max(1, total.numel()))).to(looks.dtype)


def _variance(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `var` and `std`: sums squared distances from the mean, then divides by the corrected count."""
    part, given, dims, looks = _read_call(func, args, kwargs)
    correction, values = given.get("correction"), part.to(_wide(part.dtype))
    apart = values - values.mean(dims, keepdim=True)
    squares = (apart * apart).sum(dims, keepdim=bool(given.get("keepdim")))
    count = part.numel() / max(1, squares.numel())
    found = squares / max(0.0, count - (1.0 if correction is None else float(correction)))
    return (found.sqrt() if "std" in func._schema.name else found).to(looks.dtype)


def _clip_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements vector norms, with a fast path for the call that gradient clipping makes."""
    part = args[0]
    if part.held.of_gradient and len(args) < 3 and not kwargs and part.dtype.is_floating_point:
        of_all: Tensor = part.held.norm(float(args[1]) if args[1:] else 2.0).to(part.dtype)
        return of_all
    return _reduce(func, args, kwargs)


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
    parts[0].spread.reduce(found_inf, dist.ReduceOp.MAX, "" if found_inf.is_cuda else "unscaling")


REDUCTIONS: Mapping[Any, Rule] = MappingProxyType(
    {
        **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _reduce),
        **dict.fromkeys((aten.max.default, aten.min.default, aten.amax.default, aten.amin.default), _reduce),
        **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), _reduce),
        **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), _reduce),
        aten.linalg_vector_norm.default: _clip_norm,
        **dict.fromkeys((aten.mean.default, aten.mean.dim), _mean),
        **dict.fromkeys((aten.std.correction, aten.var.correction), _variance),
        aten._amp_foreach_non_finite_check_and_unscale_.default: _unscaled,
    }
)
"""The ops that reduce all elements or a dimension. Others, such as `median`, run on gathered tensors."""
