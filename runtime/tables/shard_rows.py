"""Reads and writes rows of a shard by ids, also for gradients stored as rows.

Contract
    A rank writes its own columns of the rows. Reads return whole rows.
    A gradient stored as rows keeps that form under ops that map zero to zero (scaling, clamping, sums of two of them).
    A part of a sparse gradient behaves like a coalesced COO tensor: the ids of its rows, and their values in this
    rank's columns.
    Rules return `NotImplemented` for operands that they do not support.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.tables.gradient_storage import GradientStorage
from embrace_fx.runtime.tables.local_storage import LocalStorage, Rows
from embrace_fx.runtime.tables.shard_layout import Axis, arguments_by_name
from embrace_fx.runtime.tables.table_shard import Rule, TableShard

aten = torch.ops.aten


def _row_ids(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Returns the ids of the rows that an op reads or writes by a tensor of ids or a mask of rows. Returns None for
    other indices, or if the rows are sharded.
    """
    part, given = args[0], arguments_by_name(func, args[1:], kwargs)
    indices = given["indices"] if "indices" in given else [given["index"]]
    if part.dim() != 2 or part.spread.axes[0].of or given.get("dim", 0) % 2 or len(indices) != 1:
        return None
    ids: Tensor = indices[0]
    if ids.dtype == torch.bool and ids.shape == part.shape[:1] and not isinstance(ids, TableShard):
        return ids.nonzero().view(-1)
    return ids if ids.dtype in (torch.int64, torch.int32) and not isinstance(ids, TableShard) else None


def _write_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `x[ids] = values`, `x[mask] = value`, `index_fill_`, `index_copy_` and `index_add_` for rows."""
    part, given = args[0], arguments_by_name(func, args[1:], kwargs)
    key = next(name for name in ("values", "value", "source") if name in given)
    values, ids = given[key], _row_ids(func, args, kwargs)
    if ids is None:
        mask, *others = given.get("indices", [None, None])
        is_fill = not others and mask.dtype == torch.bool and mask.shape == part.shape and not given["accumulate"]
        is_fill = is_fill and values.numel() == 1 and not isinstance(values, TableShard)
        return part.masked_fill_(mask, values.view(())) if is_fill else NotImplemented
    shape, columns = torch.Size((*ids.shape, part.shape[1])), part.spread.axes[1]
    if key == "values" and torch.broadcast_shapes(values.shape, shape) != shape:
        return NotImplemented
    if key == "source" and values.shape != shape:
        return NotImplemented
    if isinstance(values, TableShard):
        *others, last = values.spread.axes or (None,)
        if last != columns or any(axis.of for axis in others):
            return NotImplemented
        values = values.held.dense()
    elif isinstance(values, Tensor) and values.dim() and values.shape[-1] == columns.size:
        values = values[..., columns.index]
    func(part.held.memory(), **{**given, key: values})
    return part


def _read_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `x[ids]` and `index_select` for rows. Collective: each rank may read different ids."""
    part, ids, layout = args[0], _row_ids(func, args, kwargs), args[0].spread
    if ids is None or layout.is_alone:
        return NotImplemented
    every, mine = layout.gather_ids(ids.flatten().to(part.device))
    if len(every) and not -part.shape[0] <= int(every.min()) <= int(every.max()) < part.shape[0]:
        raise IndexError(f"index out of bounds: the table has {part.shape[0]:,} rows")
    rows = layout.with_axes((Axis.whole(len(every)), layout.axes[1]))
    return rows.whole(part.held.dense()[every], "rows")[mine].view(*ids.shape, part.shape[1])


# -- gradients in rows -------------------------------------------------------------------------------------------------


def _row_gradient_storage(part: Any) -> Any:
    """Returns the storage of a gradient that is stored as its nonzero rows, or None for other values."""
    held = part.held if isinstance(part, TableShard) else None
    return None if held is None or held.is_dense else held


def _zero_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `zero_` for the gradient of a table."""
    if not args[0].held.of_gradient:
        return NotImplemented
    args[0].held.set_zero()
    return args[0]


def _map_rows(func: Any, args: Any, kwargs: Any) -> Any:
    """Applies an in-place element-wise op that maps zero to zero to a gradient that is stored as its nonzero rows."""
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
    """Implements `add_` of two gradients that are stored as their nonzero rows."""
    held, other = _row_gradient_storage(args[0]), _row_gradient_storage(args[1])
    if held is None or other is None or kwargs or not args[0].spread.fits(args[1].spread):
        return NotImplemented
    held.add_rows(*other.rows())
    return args[0]


# -- sparse gradients --------------------------------------------------------------------------------------------------


def _writable_rows(part: TableShard, asked: str) -> Rows:
    """Returns the ids (K,) and this rank's columns of the rows (K, d) of a gradient, for the caller to write. Raises
    `RuntimeError` if the table is sharded by rows, or if views of the dense gradient exist.
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
    **dict.fromkeys(
        (aten.indices.default, aten._indices.default),
        lambda func, args, kwargs: _writable_rows(args[0], "indices()")[0][None],
    ),
    aten._nnz.default: lambda func, args, kwargs: len(_writable_rows(args[0], "_nnz()")[0]),
    aten._to_dense.default: _to_dense,
}


def _sparse_property(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements ops on sparse tensors, such as `indices()`, for a gradient that presents itself as sparse."""
    part: TableShard = args[0]
    return _OF_SPARSE[func](func, args, kwargs) if part.is_sparse else func(part.new_zeros([0] * part.dim()), *args[1:])


def _sparse_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Implements `norm` of a sparse gradient as the vector norm of the dense gradient."""
    order, dims, *keep = (*args[1:], None, None)[: max(2, len(args) - 1)]
    return torch.linalg.vector_norm(
        args[0], 2.0 if order is None else order, dims or None, bool(keep and keep[0]), **kwargs
    )


def _refuse_lookup(func: Any, args: Any, kwargs: Any) -> Any:
    """Raises for a lookup outside of the compiled model, because each rank has only some columns of the rows."""
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
        **dict.fromkeys(
            (
                *(aten.index_put_.default, aten._index_put_impl_.default, aten.index_fill_.int_Scalar),
                *(aten.index_fill_.int_Tensor, aten.index_copy_.default, aten.index_add_.default),
            ),
            _write_rows,
        ),
        **dict.fromkeys((aten.index.Tensor, aten.index_select.default), _read_rows),
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
