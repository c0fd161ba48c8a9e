"""Layouts: which elements of a table, of a view of it, or of what an optimizer keeps of it a rank holds.

Contract
    A layout is of the whole tensor, as if it lay on one rank. All that ranks decide alike (which operands fit together,
    what has to be reduced, whether a view can be had) follows from what is the same on all of them: sizes, and
    `Axis.of`; the ranges differ.

Shape legend: V x D a table; V' x d a rank's part of it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.gathering import all_gather_single
from embrace_fx.runtime.tables.layouts import own_part
from embrace_fx.vocabulary.plan import Grid

E = TypeVar("E", bound=Exception)


class NotAView(Exception):
    """Raised where a rank's part of a result is no view of its part of the tensor."""


@dataclass(frozen=True)
class Axis:
    """One dimension.

    Attributes:
        own: the indices that this rank holds.
        of: which indices of which dimension of a table these are; the same on all ranks. Empty: every rank holds all.
    """

    size: int
    own: range
    of: tuple[object, ...] = ()

    @classmethod
    def whole(cls, size: int) -> Axis:
        """Makes a dimension of which every rank holds all."""
        return cls(size, range(size))

    @property
    def is_tables(self) -> bool:
        """Whether it is all of a table's."""
        return len(self.of) == len(("rows or columns", "size", "ranks"))

    @property
    def index(self) -> slice:
        """This rank's indices."""
        return slice(self.own.start, self.own.stop, self.own.step) if len(self.own) else slice(0, 0)

    def picked(self, asked: slice) -> tuple[Axis, slice]:
        """Returns the axis of a slice of it, and where that slice is in what this rank holds."""
        picks, own = range(self.size)[asked], self.own
        if not self.of:
            return Axis.whole(len(picks)), asked
        of = (*self.of, picks.start, picks.step)
        if own.step == 1:  # the picks that lie between two bounds
            first = max(0, -(-(own.start - picks.start) // picks.step))
            last = min(len(picks), -(-(own.stop - picks.start) // picks.step))
            kept = range(first, max(first, last))
            begin = picks.start + first * picks.step - own.start if kept else 0
            return Axis(len(picks), kept, of), slice(begin, begin + len(kept) * picks.step, picks.step)
        if picks.step != 1:
            raise NotAView
        skipped = (own.start - picks.start) % own.step
        kept = range(skipped, len(picks), own.step)
        begin = (picks.start + skipped - own.start) // own.step if kept else 0
        return Axis(len(picks), kept, of), slice(begin, begin + len(kept))


@dataclass(frozen=True)
class Layout:
    """The layout of a table over the ranks, or of a view of it.

    Attributes:
        name: of the table.
        mesh: of the ranks that have its parts; None: this rank has all of it.
        communicator: finds that of those ranks, as long as it is there.
        group: of those ranks, which a mesh of rows and columns has not.
        shape, stride: of the whole tensor; a table's shape is (V, D).
        axes: its dimensions; those it had before a view merged them where `is_flat`.
        chosen: indices that a view has chosen, along dimensions of which ranks hold different ones: one rank has them.
        operands: hash of the tensors and numbers that its elements were computed with, which may differ between ranks.
    """

    name: str
    mesh: DeviceMesh | None
    communicator: Callable[[], Communicator | None]
    shape: torch.Size
    stride: tuple[int, ...]
    axes: tuple[Axis, ...]
    chosen: tuple[object, ...] = ()
    group: dist.ProcessGroup | None = None
    operands: Tensor | int = field(default=0, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    @classmethod
    def of_table(
        cls,
        name: str,
        shape: torch.Size,
        mesh: DeviceMesh | None = None,
        communicator: Callable[[], Communicator | None] = lambda: None,
    ) -> Layout:
        """Lays a table out over a mesh."""
        axes = tuple(map(Axis.whole, shape))
        if mesh is not None:
            grid = Grid(*mesh.shape) if mesh.ndim > 1 else Grid(1, mesh.size())
            parts = zip(("rows", "columns"), shape, own_part(shape, mesh), (grid.rows, grid.columns), strict=True)
            axes = tuple([Axis(size, range(size)[own], (dim, size, n) if n > 1 else ()) for dim, size, own, n in parts])
        known = communicator()
        group = known.group if known is not None else None
        return cls(name, mesh, communicator, shape, (), (), group=group).with_axes(axes)

    def with_axes(self, axes: tuple[Axis, ...], chosen: tuple[object, ...] = ()) -> Layout:
        """Lays a contiguous tensor of other axes out over the same ranks."""
        shape = torch.Size(axis.size for axis in axes)
        stride = torch.empty(shape, device="meta").stride()
        return replace(self, shape=shape, stride=stride, axes=axes, chosen=chosen)

    @property
    def is_alone(self) -> bool:
        """Whether this rank holds all of the table."""
        return self.mesh is None

    @property
    def grid(self) -> Grid | None:
        """The grid on which the table lies; None: by columns."""
        return Grid(*self.mesh.shape) if self.mesh is not None and self.mesh.ndim > 1 else None

    @property
    def is_table(self) -> bool:
        """Whether it is of all of a table."""
        return len(self.axes) == 2 and self.fits(Layout.of_table(self.name, self.shape, self.mesh, self.communicator))

    def by_columns(self) -> Layout:
        """Lays the same table out by columns over the same ranks."""
        if self.grid is None:
            return self
        assert self.group is not None
        assert self.mesh is not None
        mesh = DeviceMesh.from_group(self.group, self.mesh.device_type)
        return Layout.of_table(self.name, self.shape, mesh, self.communicator)

    def reduce(self, value: Tensor, reduce_op: dist.ReduceOp.RedOpType, asked: str) -> Tensor:
        """Makes a rank's numbers those of all ranks, in place. Collective.

        Args:
            asked: what is asked of the table, in a word; "": ranks do not meet before, on the path of a device's step.
        """
        if self.mesh is None:
            return value
        if (communicator := self.communicator()) is not None:
            if communicator.is_open:
                if not asked:
                    return communicator.reduce_scalar(value, reduce_op)
                return communicator.reduce_asked(value, reduce_op, self._what(asked))
            communicator.check_fork()
        for group in self.mesh.get_all_groups():  # the model has been closed, or has gone
            dist.all_reduce(value, reduce_op, group=group)
        return value

    def computed_with(self, others: Sequence[Layout], operands: Sequence[Tensor], numbers: Sequence[Any]) -> Layout:
        """Lays out what is computed of parts of these layouts, with whole tensors and with numbers."""
        found = sum(each.operands for each in others) + sum(map(_hash_of, operands))
        found += hash(tuple(numbers)) & _BITS if numbers else 0
        return replace(self, operands=found & _BITS)

    def _what(self, asked: str) -> str:
        """What is asked, in words that are the same on all ranks if they ask the same."""
        told, computed = f"{asked} of the sharded {self.name}", int(self.operands)
        return f"{told} with operands of hash {computed:x}" if computed else told

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the error of a broken collective names the ranks that are gone, or stuck."""
        communicator = self.communicator()
        return contextlib.nullcontext() if communicator is None else communicator.watching()

    def note_deed(self) -> None:
        """Notes that this rank has done something with its part, which all ranks have to do."""
        communicator = self.communicator() if self.mesh is not None else None
        if communicator is not None and threading.current_thread() is threading.main_thread():
            communicator.deeds += 1

    def told(self, error: E) -> E:
        """Returns what this rank is about to raise, once ranks that may wait for it elsewhere can know of it.

        Raises:
            RuntimeError: this is a forked child.
        """
        if (communicator := self.communicator()) is not None and not self.is_alone:
            communicator.check_fork()
            communicator.refuse(str(error))
        return error

    def meet(self) -> None:
        """Waits until all ranks ask for all of it. Collective."""
        self.reduce(torch.zeros(1, device="cpu"), dist.ReduceOp.SUM, _ALL)

    def whole(self, own: Tensor) -> Tensor:
        """Puts the parts of all ranks together, on every rank. Collective."""
        if self.mesh is None:
            return own.detach().clone()
        cut = [dim for dim, axis in enumerate(self.axes) if axis.of]
        if self.shape.numel() and not self.chosen and len(cut) == self.mesh.ndim == 1 and self.axes[cut[0]].is_tables:
            return self._gathered(own, cut[0]).view(self.shape)
        whole = torch.zeros([axis.size for axis in self.axes], dtype=own.dtype, device=own.device)
        self.cut_into(whole, own)
        return self.summed(whole).view(self.shape)

    def summed(self, whole: Tensor) -> Tensor:
        """Joins tensors of which each rank has some elements, and zeros for all others. Collective."""
        # Bytes: sums of numbers would lose the sign of a zero.
        return (
            self.reduce(whole.view(-1).view(torch.uint8), dist.ReduceOp.SUM, _ALL).view(whole.dtype).view(whole.shape)
        )

    def joined(self, own: Tensor) -> tuple[Tensor, slice]:
        """Joins ids (D, K), of which each rank has as many as it likes; and tells which are this rank's. Collective."""
        assert self.mesh is not None
        ranks = self.mesh.mesh.flatten().tolist()
        at, count = ranks.index(self.mesh.get_rank()), own.shape[1]
        counts = torch.zeros(len(ranks), dtype=torch.int64, device=own.device)
        counts[at] = count
        ends = self.reduce(counts, dist.ReduceOp.SUM, "rows").cumsum(0).tolist()
        mine = slice(ends[at] - count, ends[at])
        every = own.new_zeros((len(own), ends[-1]))
        every[:, mine] = own
        return self.reduce(every, dist.ReduceOp.SUM, "rows"), mine

    def _gathered(self, own: Tensor, dim: int) -> Tensor:
        """Gathers parts along the dimension of a table's columns, of which the last ranks may have fewer."""
        assert self.mesh is not None
        sizes = [axis.size for axis in self.axes]
        own = own.reshape([len(axis.own) for axis in self.axes]).movedim(dim, 0)
        size, ranks = sizes.pop(dim), self.mesh.size()
        sent = own.new_zeros((-(-size // ranks), *sizes))
        sent[: len(own)] = own
        flat, communicator = sent.view(-1).view(torch.uint8), self.communicator()
        if communicator is not None and communicator.is_open:
            everyone = communicator.gather_asked(flat, self._what(_ALL))
        else:  # the model has been closed, or has gone
            everyone = flat.new_empty((ranks * flat.numel(),))
            all_gather_single(everyone, flat, group=self.mesh.get_group())
        return everyone.view(own.dtype).view(-1, *sizes)[:size].movedim(0, dim).contiguous()

    @property
    def is_flat(self) -> bool:
        """Whether a view has merged dimensions."""
        return self.shape != torch.Size(axis.size for axis in self.axes)

    @property
    def is_apart(self) -> bool:
        """Whether ranks hold different elements."""
        return bool(self.chosen) or any(axis.of for axis in self.axes)

    def fits(self, other: Layout) -> bool:
        """Whether every rank holds the same elements of both."""
        mine, theirs = ([(axis.size, axis.of) for axis in each.axes] for each in (self, other))
        return self.shape == other.shape and self.chosen == other.chosen and mine == theirs

    def meta(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a tensor without memory that looks as the whole one."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device="meta")

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, a view where that can be."""
        parts = whole.reshape([axis.size for axis in self.axes])[tuple(axis.index for axis in self.axes)]
        return parts.reshape(-1) if self.is_flat else parts

    def cut_into(self, whole: Tensor, local: Tensor) -> None:
        """Writes this rank's part of a whole tensor of these axes into it."""
        own = whole[tuple(axis.index for axis in self.axes)]
        if own.numel() == local.numel():  # a rank may hold nothing of a tensor without dimensions
            own.copy_(local.reshape(own.shape))


def without_axes(layout: Layout, dims: Sequence[int], *, keep: bool) -> Layout:
    """Lays out the result of a reduction over dimensions of which every rank holds all."""
    axes = [Axis.whole(1) if dim in dims else axis for dim, axis in enumerate(layout.axes) if keep or dim not in dims]
    return layout.with_axes(tuple(axes), layout.chosen)


_ALL = "all"
_BITS = (1 << 48) - 1


def _hash_of(operand: Tensor) -> Tensor:
    """Hashes a tensor's values, in their order, without waiting for a device."""
    values = torch.view_as_real(operand) if operand.is_complex() else operand
    bits = values.detach().to(torch.float64).contiguous().view(-1).view(torch.int64)
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum() & _BITS


# -- views -------------------------------------------------------------------------------------------------------------

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
