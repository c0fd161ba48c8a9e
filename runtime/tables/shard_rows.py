"""Reads and writes rows of a shard by ids, also for gradients stored as rows.

Contract
    A rank writes its own columns of the rows. Reads return whole rows.
    A gradient stored as rows keeps that form under ops that map zero to zero (scaling, clamping, sums of two of them).
    A part of a sparse gradient behaves like a coalesced COO tensor: the ids of its rows, and their values in this
        rank's
    columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.tables.gradient_storage import GradientStorage
from embrace_fx.runtime.tables.local_storage import LocalStorage, Rows
from embrace_fx.runtime.tables.shard_layout import Axis
from embrace_fx.runtime.tables.table_shard import Rule, TableShard

aten = torch.ops.aten


def _to_own_indices(ids: Tensor, axis: Axis) -> tuple[Tensor, Tensor | None]:
    """Converts ids along a dimension of the whole tensor to indices in this rank's shard.

    Returns:
        The indices, and a mask of the ids that this rank has, or None if it has all.
    """
    _check_ids(ids, axis)
    ids = torch.where(ids < 0, ids + axis.size, ids)
    if not axis.of:
        return ids, None
    own = axis.own
    apart = ids - own.start
    return apart // own.step, (apart >= 0) & (ids < own.stop) & (apart % own.step == 0)


def _unravel(ids: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Converts indices of a flattened tensor to indices along its original dimensions, which have these sizes."""
    ids, _ = _to_own_indices(ids, Axis.whole(prod(sizes)))
    return list(torch.unravel_index(ids, sizes))


def _check_ids(ids: Tensor, axis: Axis) -> None:
    """Raises `IndexError` if ids are out of the bounds of an axis."""
    if ids.numel() and not bool(((ids >= -axis.size) & (ids < axis.size)).all()):
        raise IndexError(
            f"index out of bounds: a dimension of size {axis.size} has indices {-axis.size} to {axis.size - 1}"
        )


def _ids_of(indices: Sequence[Any], part: TableShard) -> list[Tensor] | None:
    """Converts the index expression of `part[indices]` to one tensor of ids for each indexed leading dimension, all of
    the same shape. Returns None if the expression has indices other than plain tensors.
    """
    found: list[Tensor] = []
    while indices and indices[-1] is None:
        indices = indices[:-1]
    for each in indices:
        if not isinstance(each, Tensor) or isinstance(each, TableShard):
            return None
        if each.dtype in (torch.bool, torch.uint8):
            if each.shape != part.shape[len(found) : len(found) + each.dim()]:
                raise IndexError(
                    f"the shape {tuple(each.shape)} of the mask does not match the shape {tuple(part.shape)} of the "
                    "indexed tensor"
                )
            found += each.nonzero().unbind(1)
        elif each.dtype in (torch.int64, torch.int32):
            found.append(each.to(torch.int64))
        else:
            raise IndexError(f"tensors used as indices must be long, int, byte or bool tensors, not {each.dtype}")
    return list(torch.broadcast_tensors(*found)) if found else None


def _own_values(values: Tensor, shape: Sequence[int], axes: Sequence[Axis], rows: int) -> Tensor | None:
    """Returns this rank's elements of values that are broadcast to `shape`. Returns None if `values` is sharded in
    another layout.

    Args:
        axes: the trailing dimensions of `shape`. Along these, this rank needs only its own indices.
        rows: the number of leading dimensions of `shape`. Along these, this rank needs all indices.
    """
    if isinstance(values, TableShard):
        mine = [axis.of for axis in values.spread.axes]
        fits = values.shape == torch.Size(shape) and mine == [()] * rows + [axis.of for axis in axes]
        return values.held.dense() if fits and not values.spread.chosen and not values.spread.is_flat else None
    return values.expand(shape)[(slice(None),) * rows + tuple(axis.index for axis in axes)]


def _index_put(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `index_put_`: writes values at ids into this rank's rows and columns."""
    part, indices, values, *rest = args
    accumulate = kwargs.get("accumulate", rest[0] if rest else False)
    if not isinstance(part, TableShard) or (part.spread.is_flat and part.dim() > 1):
        return NotImplemented
    if len(indices) == 1 and isinstance(indices[0], TableShard):
        return _masked_put(part, indices[0], values, accumulate)
    ids, axes = _ids_of(indices, part), part.spread.axes
    if ids is None:
        return NotImplemented
    if part.spread.is_flat:
        ids = _unravel(ids[0], [axis.size for axis in axes])
    apart, shape = axes[len(ids) :], [*ids[0].shape, *(axis.size for axis in axes[len(ids) :])]
    if values.dtype != part.dtype and values.dim():
        return NotImplemented  # makes torch raise its own error
    own = _own_values(values.to(part.dtype), shape, apart, ids[0].dim())
    if own is None:
        return NotImplemented
    counted = [_to_own_indices(each, axis) for each, axis in zip(ids, axes, strict=False)]
    kept = [has for _, has in counted if has is not None]
    local_ids = [each for each, _ in counted]
    if kept:
        keep = torch.stack(kept).all(0)
        local_ids, own = [each[keep] for each in local_ids], own[keep]
    local = part.held.memory().view([len(axis.own) for axis in axes])
    if local.numel() and local_ids[0].numel():
        local.index_put_(tuple(local_ids), own, accumulate)
    return part


def _masked_put(part: TableShard, mask: TableShard, values: Any, accumulate: bool) -> Any:
    """Writes a single value, or adds it if `accumulate`, wherever a boolean mask of the same layout is true. Returns
    `NotImplemented` for other masks or values.
    """
    if (
        not mask.spread.fits(part.spread)
        or mask.dtype != torch.bool
        or values.numel() != 1
        or isinstance(values, TableShard)
    ):
        return NotImplemented
    local = part.held.memory()
    local.index_put_([mask.held.dense()], values, accumulate)
    return part


def _index_put_copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `index_put`: writes values at ids into a copy of a shard."""
    return _index_put(func, (args[0].clone(), *args[1:]), kwargs) if isinstance(args[0], TableShard) else NotImplemented


def _index_op(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `index_fill_`, `index_copy_` and `index_add_`, and their variants that are not in-place."""
    part, dim, ids, value = args[:4]
    if not isinstance(part, TableShard) or isinstance(ids, TableShard) or part.spread.is_flat or not part.dim():
        return NotImplemented
    if not func._schema.is_mutable:
        part = part.clone()
    dim %= part.dim()
    axes, keep = part.spread.axes, None
    local_ids, keep = _to_own_indices(ids.reshape(-1), axes[dim])
    own = value
    if isinstance(value, Tensor) and value.dim():
        rest = (*axes[:dim], *axes[dim + 1 :])
        shape = [ids.numel(), *(axis.size for axis in rest)]
        if value.dim() != part.dim() or value.movedim(dim, 0).shape != torch.Size(shape):
            return NotImplemented
        found = _own_values(value.movedim(dim, 0), shape, rest, 1)
        if found is None:
            return NotImplemented
        own = (found if keep is None else found[keep]).movedim(0, dim)
    local = part.held.memory()
    local_ids = local_ids if keep is None else local_ids[keep]
    if local.numel() and local_ids.numel():
        name = func._schema.name.removeprefix("aten::").removesuffix("_") + "_"
        getattr(local, name)(dim, local_ids, own, **kwargs)
    return part


def _index_read(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `x[ids]` for a shard x. Returns whole rows, because ranks may read different ids. Collective."""
    part, indices = args
    if not isinstance(part, TableShard) or part.spread.is_flat or part.spread.chosen or part.spread.is_alone:
        return NotImplemented
    ids = _ids_of(indices, part)
    return NotImplemented if ids is None else _read_whole_rows(part, ids)


def _select_index(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `index_select` of rows. Returns whole rows. Collective."""
    part, dim, ids = args
    return (
        _index_read(func, (part, [ids]), {})
        if isinstance(part, TableShard) and dim in (0, -part.dim())
        else NotImplemented
    )


def _read_whole_rows(part: TableShard, ids: Sequence[Tensor]) -> Tensor:
    """Reads the whole rows at this rank's ids. Each rank sends its columns of the rows that any rank reads. Collective.

    Args:
        ids: one tensor of ids for each indexed leading dimension.
    """
    layout, axes, rest = part.spread, part.spread.axes[: len(ids)], part.spread.axes[len(ids) :]
    every, mine = layout.gather_ids(torch.stack([*ids]).flatten(1).to(part.device))
    counted = [_to_own_indices(each, axis) for each, axis in zip(every, axes, strict=True)]
    kept = [has for _, has in counted if has is not None]
    keep: Any = torch.stack(kept).all(0) if kept else slice(None)
    whole = torch.zeros((every.shape[1], *(axis.size for axis in rest)), dtype=part.dtype, device=part.device)
    rows = part.held.dense()[tuple(each[keep] for each, _ in counted)]
    whole[(slice(None), *(axis.index for axis in rest))][keep] = rows
    return layout.sum_disjoint(whole)[mine].view(*ids[0].shape, *whole.shape[1:])


# -- gradients in rows -------------------------------------------------------------------------------------------------


def _row_gradient_storage(part: Any) -> Any:
    """Returns the storage of a gradient that is stored as its nonzero rows and ids, or None for other values."""
    held = part.held if isinstance(part, TableShard) else None
    return None if held is None or held.is_dense else held


def _zero_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `zero_` for the gradient of a table. Returns `NotImplemented` for other shards."""
    if not args[0].held.of_gradient:
        return NotImplemented
    args[0].held.set_zero()
    return args[0]


def _map_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Applies an in-place element-wise op to a gradient that is stored as its nonzero rows. Returns `NotImplemented`
    for other operands, or if the op may not map zero to zero.
    """
    (part, *given), held = args, _row_gradient_storage(args[0])
    tensors = [each for each in (*given, *kwargs.values()) if isinstance(each, Tensor)]
    if held is None or any(isinstance(each, TableShard) or each.dim() for each in tensors):
        return NotImplemented
    # Check that the op maps zero to zero; reject tensor arguments, whose values the host does not know.
    if func not in _LINEAR:
        zero = torch.zeros(1, dtype=part.dtype, device="cpu")
        if tensors or bool(func(zero, *given, **kwargs).any()):
            return NotImplemented
    held.map(lambda values: func(values.clone(), *given, **kwargs))
    return part


_LINEAR = frozenset({aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar})


def _add_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `add_` of two gradients that are stored as their nonzero rows. Returns `NotImplemented` for other
    operands.
    """
    held, other = _row_gradient_storage(args[0]), _row_gradient_storage(args[1])
    if held is None or other is None or kwargs or not args[0].spread.fits(args[1].spread):
        return NotImplemented
    held.add_rows(*other.rows())
    return args[0]


# -- sparse gradients --------------------------------------------------------------------------------------------------


def _writable_rows(part: TableShard, asked: str) -> Rows:
    """Returns the ids (K,) and this rank's columns of the rows (K, d) of a gradient, which the caller may write.

    Args:
        asked: the operation that writes the rows, for the error.

    Raises:
        RuntimeError: the table is sharded by rows, or views of the dense gradient exist.
    """
    held = part.held
    found = held.shown_rows() if isinstance(held, GradientStorage) and not part.spread.axes[0].of else None
    if found is None:
        raise part.refused(asked)
    return found


def _sparse_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `values()` of a sparse gradient: returns its rows as a sharded tensor."""
    part: TableShard = args[0]
    ids, rows = _writable_rows(part, "values()")
    layout = part.spread.with_axes((Axis.whole(len(ids)), *part.spread.axes[1:]))
    return part.like(LocalStorage(rows, part.held.viewer()), layout)


def _indices(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Implements `indices()` of a sparse gradient: returns the ids of its rows."""
    return _writable_rows(args[0], "indices()")[0][None]


def _nnz(func: Any, args: Any, kwargs: Any) -> int:
    """Implements `_nnz()` of a sparse gradient: returns the number of its rows."""
    return len(_writable_rows(args[0], "_nnz()")[0])


def _to_dense(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `to_dense()`: returns a copy of a sparse gradient as a dense shard."""
    part: TableShard = args[0]
    dtype = kwargs.get("dtype") or (args[1] if len(args) > 1 else None) or part.dtype
    return part.like(LocalStorage(part.held.dense().to(dtype, copy=True)), part.spread)


_OF_SPARSE: Mapping[Any, Rule] = {
    aten.is_coalesced.default: lambda func, args, kwargs: True,
    aten.sparse_dim.default: lambda func, args, kwargs: 1,
    aten.dense_dim.default: lambda func, args, kwargs: args[0].dim() - 1,
    **dict.fromkeys((aten.values.default, aten._values.default), _sparse_values),
    **dict.fromkeys((aten.indices.default, aten._indices.default), _indices),
    aten._nnz.default: _nnz,
    aten._to_dense.default: _to_dense,
}


def _sparse_property(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements ops on sparse tensors, such as `indices()`, for a gradient that presents itself as sparse. Other
    shards behave like dense tensors.
    """
    part: TableShard = args[0]
    return _OF_SPARSE[func](func, args, kwargs) if part.is_sparse else func(part.new_zeros([0] * part.dim()), *args[1:])


def _sparse_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `norm` of a sparse gradient as the vector norm of the dense gradient."""
    order, dims, *keep = (*args[1:], None, None)[: max(2, len(args) - 1)]
    return torch.linalg.vector_norm(
        args[0], 2.0 if order is None else order, dims or None, bool(keep and keep[0]), **kwargs
    )


def _refuse_lookup(func: Any, args: Any, kwargs: Any) -> Any:
    """Raises an error for a lookup outside of the compiled model, because each rank has only some columns of the rows.
    Returns `NotImplemented` if this rank has the whole table.
    """
    if args[0].spread.is_alone:
        return NotImplemented
    raise args[0].spread.report(
        RuntimeError(
            f"a lookup in {args[0].what} was called outside of the compiled model, where each rank has only some "
            "columns of the table. Call the compiled model on every rank, under join() if loaders differ in length. Or "
            "enter `with model.whole() as plain:` on every rank, and call plain or one of its modules."
        )
    )


ROWS: Mapping[Any, Rule] = MappingProxyType(
    {
        aten.index_put_.default: _index_put,
        aten._index_put_impl_.default: _index_put,
        aten.index_put.default: _index_put_copy,
        **dict.fromkeys(
            (
                *(aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor, aten.index_copy_.default),
                *(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.index_copy.default),
                *(aten.index_add_.default, aten.index_add.default),
            ),
            _index_op,
        ),
        aten.index.Tensor: _index_read,
        aten.index_select.default: _select_index,
        aten.zero_.default: _zero_rows,
        **dict.fromkeys((*_LINEAR, aten.clamp_.default, aten.clamp_min_.default, aten.clamp_max_.default), _map_rows),
        aten.add_.Tensor: _add_rows,
        **dict.fromkeys(
            (
                *(aten.embedding.default, aten.embedding_renorm_.default, aten._embedding_bag.default),
                *(aten._embedding_bag_forward_only.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx),
            ),
            _refuse_lookup,
        ),
        # Queries of sparse gradients. torch asks for the layout of no other shard.
        torch.ops.prim.layout.default: lambda func, args, kwargs: torch.sparse_coo,
        **dict.fromkeys(_OF_SPARSE, _sparse_property),
        **dict.fromkeys((aten.norm.Scalar, aten.norm.ScalarOpt_dim), _sparse_norm),
    }
)
"""Ops that read or write rows by ids, keep a gradient as rows, or are called on sparse gradients."""
