"""A part of a sparse gradient answers as a coalesced COO tensor: ids of its rows, and their values in its columns."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.tables.held import Held, Rows
from embrace_fx.runtime.tables.held_gradient import HeldGradient
from embrace_fx.runtime.tables.part import Part, Rule
from embrace_fx.runtime.tables.part_layout import Axis

aten = torch.ops.aten


def _rows(part: Part, asked: str) -> Rows:
    """Returns ids (K,) and this rank's columns of their rows (K, d), which may be written.

    Raises:
        RuntimeError: ranks hold other rows, or views of all elements are held.
    """
    held = part.held
    found = held.shown_rows() if isinstance(held, HeldGradient) and not part.spread.axes[0].of else None
    if found is None:
        raise part.refused(asked)
    return found


def _values(func: Any, args: Any, kwargs: Any) -> Any:
    part: Part = args[0]
    ids, rows = _rows(part, "its values()")
    layout = part.spread.with_axes((Axis.whole(len(ids)), *part.spread.axes[1:]))
    return part.like(Held(rows, part.held.viewer()), layout)


def _indices(func: Any, args: Any, kwargs: Any) -> Tensor:
    return _rows(args[0], "its indices()")[0][None]


def _nnz(func: Any, args: Any, kwargs: Any) -> int:
    return len(_rows(args[0], "the number of its rows")[0])


def _to_dense(func: Any, args: Any, kwargs: Any) -> Any:
    part: Part = args[0]
    dtype = kwargs.get("dtype") or (args[1] if len(args) > 1 else None) or part.dtype
    return part.like(Held(part.held.dense().to(dtype, copy=True)), part.spread)


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    order, dims, *keep = (*args[1:], None, None)[: max(2, len(args) - 1)]
    return torch.linalg.vector_norm(
        args[0], 2.0 if order is None else order, dims or None, bool(keep and keep[0]), **kwargs
    )


SPARSE: Mapping[Any, Rule] = MappingProxyType(
    {
        torch.ops.prim.layout.default: lambda func, args, kwargs: torch.sparse_coo,
        aten.is_coalesced.default: lambda func, args, kwargs: True,
        aten.sparse_dim.default: lambda func, args, kwargs: 1,
        aten.dense_dim.default: lambda func, args, kwargs: args[0].dim() - 1,
        **dict.fromkeys((aten.values.default, aten._values.default), _values),
        **dict.fromkeys((aten.indices.default, aten._indices.default), _indices),
        aten._nnz.default: _nnz,
        aten._to_dense.default: _to_dense,
        **dict.fromkeys((aten.norm.Scalar, aten.norm.ScalarOpt_dim), _norm),
    }
)
"""What is asked of sparse tensors; `coalesce()` returns a coalesced one as it is."""
