"""Views of a tensor of which ranks hold parts: which elements of a view a rank holds, and its part of it.

Contract
    Whether a view can be had of a part is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.tables.part_layout import Axis, Layout, NotAView

aten = torch.ops.aten

Viewed = tuple[tuple[Axis, ...], tuple[object, ...], Tensor]
"""Axes, chosen indices and this rank's part of a view."""


def view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], layout: Layout, local: Tensor) -> Any:
    """Applies a view op to a tensor's layout and part: one (layout, part), or a list of them.

    Args:
        args: its arguments but the tensor.

    Raises:
        NotAView: no part of a rank's shows it.
    """
    whole = func(layout.meta(), *args, **kwargs)  # torch's own errors, and shapes
    if layout.is_flat and func not in _OF_ANY:
        raise NotAView
    bound = arguments_of(func, args, kwargs)
    if func in _LISTS:
        pieces = _LISTS[func](layout, local, whole, **bound)
        return [(_as(layout, each, of), each[2]) for each, of in zip(pieces, whole, strict=True)]
    viewed = _VIEWS[func](layout, local, whole, **bound)
    return _as(layout, viewed, whole), viewed[2]


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments but the first one, by name, those that were left out too."""
    schema = func._schema.arguments[1:]
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    found.update({argument.name: value for argument, value in zip(schema, args, strict=False)})
    return {**found, **kwargs}


def _as(layout: Layout, viewed: Viewed, whole: Tensor) -> Layout:
    axes, chosen, _ = viewed
    return replace(layout, shape=whole.shape, stride=whole.stride(), axes=axes, chosen=chosen)


def _without(layout: Layout, local: Tensor, dim: int, index: int) -> Viewed:
    """One index of a dimension."""
    axis, rest = layout.axes[dim], (*layout.axes[:dim], *layout.axes[dim + 1 :])
    chosen = (*layout.chosen, (axis.of, index)) if axis.of else layout.chosen
    if index in axis.own:
        return rest, chosen, local.select(dim, axis.own.index(index))
    empty = tuple(Axis(each.size, range(0), each.of) for each in rest)
    return empty, chosen, local.new_empty((0,) * max(1, len(rest)))


def _select(layout: Layout, local: Tensor, whole: Tensor, dim: int, index: int) -> Viewed:
    if layout.is_flat:
        return _element(layout, local, whole, index % layout.shape.numel())
    dim %= len(layout.axes)
    return _without(layout, local, dim, index % layout.axes[dim].size)


def _element(layout: Layout, local: Tensor, whole: Tensor, index: int) -> Viewed:
    """One element of a flat view of all others."""
    if whole.dim():
        raise NotAView
    axes, chosen, own = layout.axes, layout.chosen, local.view([len(axis.own) for axis in layout.axes])
    for at in torch.unravel_index(torch.tensor(index), [axis.size for axis in axes]):
        axes, chosen, own = _without(layout.with_axes(axes, chosen), own, 0, int(at))
    return axes, chosen, own


def _slice(layout: Layout, local: Tensor, whole: Tensor, dim: int, start: Any, end: Any, step: int) -> Viewed:
    dim %= len(layout.axes)
    axis, where = layout.axes[dim].picked(slice(start, end, step))
    axes = (*layout.axes[:dim], axis, *layout.axes[dim + 1 :])
    index: list[Any] = [slice(None)] * len(axes)
    index[dim] = where
    return axes, layout.chosen, local[tuple(index)]


def _permute(layout: Layout, local: Tensor, whole: Tensor, dims: Sequence[int]) -> Viewed:
    return tuple(layout.axes[dim] for dim in dims), layout.chosen, local.permute(*dims)


def _transpose(layout: Layout, local: Tensor, whole: Tensor, dim0: int, dim1: int) -> Viewed:
    dims = list(range(len(layout.axes)))
    if dims:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(layout, local, whole, dims)


def _t(layout: Layout, local: Tensor, whole: Tensor) -> Viewed:
    return _permute(layout, local, whole, range(len(layout.axes))[::-1])


def _unsqueeze(layout: Layout, local: Tensor, whole: Tensor, dim: int) -> Viewed:
    dim %= len(layout.axes) + 1
    return (*layout.axes[:dim], Axis.whole(1), *layout.axes[dim:]), layout.chosen, local.unsqueeze(dim)


def _squeeze(layout: Layout, local: Tensor, whole: Tensor, dim: Any = None) -> Viewed:
    count = len(layout.axes)
    asked = range(count) if dim is None else [each % count for each in (dim if isinstance(dim, Sequence) else (dim,))]
    for each in sorted((d for d in asked if layout.axes[d].size == 1), reverse=True):
        axes, chosen, local = _without(layout, local, each, 0)
        layout = layout.with_axes(axes, chosen)
    return layout.axes, layout.chosen, local


def _expand(layout: Layout, local: Tensor, whole: Tensor, size: Sequence[int], implicit: bool) -> Viewed:
    new = whole.dim() - len(layout.axes)
    axes = [Axis.whole(count) for count in whole.shape[:new]]
    for axis, count in zip(layout.axes, whole.shape[new:], strict=True):
        if axis.size != count and axis.of:
            raise NotAView
        axes.append(axis if axis.size == count else Axis.whole(count))
    return tuple(axes), layout.chosen, local.expand([len(axis.own) for axis in axes])


def _reshaped(layout: Layout, local: Tensor, whole: Tensor, size: Sequence[int]) -> Viewed:
    """Views a part with its dimensions merged, or put back as they were."""
    axes, is_back = layout.axes, whole.shape == torch.Size(axis.size for axis in layout.axes)
    if not local.numel():
        return axes, layout.chosen, local.new_empty([len(axis.own) for axis in axes] if is_back and axes else (0,))
    if not local.is_contiguous():
        raise NotAView
    return axes, layout.chosen, local.view([len(axis.own) for axis in axes] if is_back else -1)


def _unbind(layout: Layout, local: Tensor, whole: Any, dim: int) -> list[Viewed]:
    return [_select(layout, local, each, dim, k) for k, each in enumerate(whole)]


def _split(layout: Layout, local: Tensor, whole: Any, dim: int, **_: Any) -> list[Viewed]:
    found, first = [], 0
    for each in whole:
        last = first + each.shape[dim]
        found.append(_slice(layout, local, each, dim, first, last, 1))
        first = last
    return found


_VIEWS: Mapping[Any, Callable[..., Viewed]] = MappingProxyType(
    {
        aten.select.int: _select,
        aten.slice.Tensor: _slice,
        aten.permute.default: _permute,
        aten.transpose.int: _transpose,
        aten.t.default: _t,
        aten.unsqueeze.default: _unsqueeze,
        aten.squeeze.default: _squeeze,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.expand.default: _expand,
        aten.view.default: _reshaped,
        aten._unsafe_view.default: _reshaped,
    }
)
_LISTS: Mapping[Any, Callable[..., list[Viewed]]] = MappingProxyType(
    {aten.unbind.int: _unbind, aten.split.Tensor: _split, aten.split_with_sizes.default: _split}
)
_OF_ANY = frozenset({aten.view.default, aten._unsafe_view.default, aten.select.int})
VIEWS = frozenset((*_VIEWS, *_LISTS))
"""The ops whose results are views that ranks have parts of."""
