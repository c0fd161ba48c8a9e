"""Layouts: which elements of a table, of a view of it, or of its optimizer state this rank has.

Contract
    A layout describes the whole tensor, as if it were on one rank. Decisions that all ranks must take alike (which
    operands match, what to reduce, whether a view exists) depend only on sizes and `Axis.of`, which are the same on all
    ranks. The ranges of indices differ.

Shape legend: V x D the table; V' x d a rank's part.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.gathering import all_gather_single
from embrace_fx.runtime.tables.layouts import own_slices
from embrace_fx.vocabulary.plan import Grid

E = TypeVar("E", bound=Exception)


class NotAView(Exception):
    """Raised if the result of a view op is not a view of this rank's shard."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a tensor that may be sharded, with the range of its indices that this rank has.

    Attributes:
        own: the range of indices that this rank has.
        of: identifies the sharded dimension of the table, or the part of it, that this axis represents. Equal on all
            ranks. Empty if every rank has all indices.
    """

    size: int
    own: range
    of: tuple[object, ...] = ()

    @classmethod
    def whole(cls, size: int) -> Axis:
        """Returns an axis of `size` indices that is not sharded: every rank has all indices."""
        return cls(size, range(size))

    @property
    def is_table_dimension(self) -> bool:
        """Whether the axis is a whole sharded dimension of the table, rather than a slice of one."""
        return len(self.of) == len(("rows or columns", "size", "ranks"))

    @property
    def index(self) -> slice:
        """This rank's indices as a slice."""
        return slice(self.own.start, self.own.stop, self.own.step) if len(self.own) else slice(0, 0)

    def slice_axis(self, indices: slice) -> tuple[Axis, slice]:
        """Slices the axis. Returns the new axis, and the slice to apply to this rank's elements.

        Raises:
            NotAView: the shard has every n-th index, and `indices` has a step too.
        """
        picks, own = range(self.size)[indices], self.own
        if not self.of:
            return Axis.whole(len(picks)), indices
        of = (*self.of, picks.start, picks.step)
        if own.step != 1 and picks.step != 1:
            raise NotAView
        if not own:  # this also holds if a view has picked an element of another rank
            return Axis(len(picks), own, of), slice(0, 0, 1)
        if own.step == 1:  # this rank's indices are those between two bounds
            first = max(0, -(-(own.start - picks.start) // picks.step))
            last = min(len(picks), -(-(own.stop - picks.start) // picks.step))
            kept = range(first, max(first, last))
            begin = picks.start + first * picks.step - own.start if kept else 0
            return Axis(len(picks), kept, of), slice(begin, begin + len(kept) * picks.step, picks.step)
        skipped = (own.start - picks.start) % own.step
        kept = range(skipped, len(picks), own.step)
        begin = (picks.start + skipped - own.start) // own.step if kept else 0
        return Axis(len(picks), kept, of), slice(begin, begin + len(kept))


@dataclass(frozen=True)
class Layout:
    """Describes which elements of a table, or of a view of it, each rank has.

    Attributes:
        name: the table's name.
        mesh: the device mesh, or None if this rank has the whole table.
        communicator: function that returns the communicator of these ranks, or None once the model is closed or
            deleted.
        group: the process group of all ranks of the mesh.
        shape, stride: the shape and stride of the whole tensor. A table's shape is (V, D).
        axes: the dimensions of the tensor. If a view has merged dimensions (`is_flat`), the dimensions before the view.
        chosen: indices that views have selected in sharded dimensions, so that only one rank has the elements.
        operands: a hash of the other operands from which the elements were computed, to detect operands that differ
            between ranks.
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
        """Returns the layout of a table that is sharded over a mesh, or of a whole table if `mesh` is None."""
        axes = tuple(map(Axis.whole, shape))
        if mesh is not None:
            grid = Grid(*mesh.shape) if mesh.ndim > 1 else Grid(1, mesh.size())
            parts = zip(("rows", "columns"), shape, own_slices(shape, mesh), (grid.rows, grid.columns), strict=True)
            axes = tuple([Axis(size, range(size)[own], (dim, size, n) if n > 1 else ()) for dim, size, own, n in parts])
        known = communicator()
        group = known.group if known is not None else None
        return cls(name, mesh, communicator, shape, (), (), group=group).with_axes(axes)

    def with_axes(self, axes: tuple[Axis, ...], chosen: tuple[object, ...] = ()) -> Layout:
        """Returns the layout of a contiguous tensor with these dimensions and `chosen` indices, over the same ranks."""
        shape = torch.Size(axis.size for axis in axes)
        stride = torch.empty(shape, device="meta").stride()
        return replace(self, shape=shape, stride=stride, axes=axes, chosen=chosen)

    @property
    def is_alone(self) -> bool:
        """Whether this rank has the whole table, so that nothing is exchanged."""
        return self.mesh is None

    @property
    def grid(self) -> Grid | None:
        """The grid on which the table is sharded, or None if it is sharded by columns."""
        return Grid(*self.mesh.shape) if self.mesh is not None and self.mesh.ndim > 1 else None

    @property
    def is_table(self) -> bool:
        """Whether this is the layout of a whole table, rather than of a view."""
        return len(self.axes) == 2 and self.fits(Layout.of_table(self.name, self.shape, self.mesh, self.communicator))

    def by_columns(self) -> Layout:
        """Returns the layout of the same table if it were sharded by columns over the same ranks."""
        if self.grid is None:
            return self
        assert self.group is not None
        assert self.mesh is not None
        mesh = DeviceMesh.from_group(self.group, self.mesh.device_type)
        return Layout.of_table(self.name, self.shape, mesh, self.communicator)

    def reduce(self, value: Tensor, reduce_op: dist.ReduceOp.RedOpType, asked: str) -> Tensor:
        """Reduces a tensor over the ranks, in place, and returns it. Collective.

        Args:
            asked: the operation's name, for errors and for ranks to check that all request the same. If "", ranks do
                not check.
        """
        if self.mesh is None:
            return value
        if (communicator := self.communicator()) is not None:
            if communicator.is_open:
                if not asked:
                    return communicator.reduce_scalar(value, reduce_op)
                return communicator.reduce_for_read(value, reduce_op, self._describe_request(asked))
            communicator.check_fork()
        for group in self.mesh.get_all_groups():  # the model has been closed or deleted
            dist.all_reduce(value, reduce_op, group=group)
        return value

    def for_result(self, others: Sequence[Layout], operands: Sequence[Tensor], numbers: Sequence[Any]) -> Layout:
        """Returns the layout of an op's result: this layout, with a hash of the op's operands as `operands`.

        Args:
            others: the layouts of the sharded operands.
            operands: the operands that are whole tensors.
            numbers: the operands that are Python numbers.
        """
        found = sum(each.operands for each in others) + sum(map(_hash_tensor, operands))
        found += hash(tuple(numbers)) & _BITS if numbers else 0
        return replace(self, operands=found & _BITS)

    def _describe_request(self, asked: str) -> str:
        """Describes a request for an error message. Ranks with equal requests get equal text.

        Args:
            asked: the name of the operation.
        """
        request, computed = f"{asked} of the sharded {self.name}", int(self.operands)
        return f"{request} with operands of hash {computed:x}" if computed else request

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that adds the names of missing or stuck ranks to the error of a failed collective."""
        communicator = self.communicator()
        return contextlib.nullcontext() if communicator is None else communicator.watching()

    def count_collective_op(self) -> None:
        """Counts an op on shards that all ranks must run. Ranks compare their counts before a step."""
        communicator = self.communicator() if self.mesh is not None else None
        if communicator is not None and threading.current_thread() is threading.main_thread():
            communicator.collective_ops += 1

    def report(self, error: E) -> E:
        """Reports an error to ranks that may be waiting for this one. Returns the error, for the caller to raise.

        Raises:
            RuntimeError: this is a forked child process.
        """
        if (communicator := self.communicator()) is not None and not self.is_alone:
            communicator.check_fork()
            communicator.refuse(str(error))
        return error

    def wait_for_ranks(self) -> None:
        """Waits until all ranks have requested the whole tensor. Collective."""
        self.reduce(torch.zeros(1, device="cpu"), dist.ReduceOp.SUM, _ALL)

    def whole(self, own: Tensor) -> Tensor:
        """Gathers the shards of all ranks into the whole tensor, on every rank. Collective.

        Args:
            own: this rank's shard.
        """
        if self.mesh is None:
            return own.detach().clone()
        cut = [dim for dim, axis in enumerate(self.axes) if axis.of]
        if (
            self.shape.numel()
            and not self.chosen
            and len(cut) == self.mesh.ndim == 1
            and self.axes[cut[0]].is_table_dimension
        ):
            return self._gathered(own, cut[0]).view(self.shape)
        whole = torch.zeros([axis.size for axis in self.axes], dtype=own.dtype, device=own.device)
        part = whole[tuple(axis.index for axis in self.axes)]
        if part.numel() == own.numel():  # a 0-dim tensor is on one rank only
            part.copy_(own.reshape(part.shape))
        return self.sum_disjoint(whole).view(self.shape)

    def sum_disjoint(self, whole: Tensor) -> Tensor:
        """Sums tensors of the whole shape over the ranks. Collective. The sum is exact, because each element is nonzero
        on at most one rank.
        """
        # Sum bytes, because a sum of floats would lose the sign of -0.0.
        return (
            self.reduce(whole.view(-1).view(torch.uint8), dist.ReduceOp.SUM, _ALL).view(whole.dtype).view(whole.shape)
        )

    def gather_ids(self, ids: Tensor) -> tuple[Tensor, slice]:
        """Concatenates the ids of all ranks. Returns them, and the slice that has this rank's ids. Collective.

        Args:
            ids: (N, K) indices of K elements along N dimensions. K may differ between ranks.
        """
        assert self.mesh is not None
        ranks = self.mesh.mesh.flatten().tolist()
        at, count = ranks.index(self.mesh.get_rank()), ids.shape[1]
        counts = torch.zeros(len(ranks), dtype=torch.int64, device=ids.device)
        counts[at] = count
        ends = self.reduce(counts, dist.ReduceOp.SUM, "rows").cumsum(0).tolist()
        mine = slice(ends[at] - count, ends[at])
        every = ids.new_zeros((len(ids), ends[-1]))
        every[:, mine] = ids
        return self.reduce(every, dist.ReduceOp.SUM, "rows"), mine

    def _gathered(self, part: Tensor, dim: int) -> Tensor:
        """Gathers the shards of all ranks, and concatenates them along the sharded dimension `dim`. The last ranks may
        have fewer indices. Collective.
        """
        assert self.mesh is not None
        sizes = [axis.size for axis in self.axes]
        part = part.reshape([len(axis.own) for axis in self.axes]).movedim(dim, 0)
        size, ranks = sizes.pop(dim), self.mesh.size()
        sent = part.new_zeros((-(-size // ranks), *sizes))
        sent[: len(part)] = part
        flat, communicator = sent.view(-1).view(torch.uint8), self.communicator()
        if communicator is not None and communicator.is_open:
            everyone = communicator.gather_for_read(flat, self._describe_request(_ALL))
        else:  # the model has been closed or deleted
            everyone = flat.new_empty((ranks * flat.numel(),))
            all_gather_single(everyone, flat, group=self.mesh.get_group())
        return everyone.view(part.dtype).view(-1, *sizes)[:size].movedim(0, dim).contiguous()

    @property
    def is_flat(self) -> bool:
        """Whether the tensor is a view with merged dimensions."""
        return self.shape != torch.Size(axis.size for axis in self.axes)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have different elements of the tensor, rather than replicas."""
        return bool(self.chosen) or any(axis.of for axis in self.axes)

    def fits(self, other: Layout) -> bool:
        """Returns whether two layouts give each rank the same elements."""
        mine, theirs = ([(axis.size, axis.of) for axis in each.axes] for each in (self, other))
        return self.shape == other.shape and self.chosen == other.chosen and mine == theirs

    def meta(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a meta tensor with the shape and stride of the whole tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device="meta")

    def cut(self, whole: Tensor) -> Tensor:
        """Returns this rank's shard of a whole tensor, as a view if possible."""
        parts = whole.reshape([axis.size for axis in self.axes])[tuple(axis.index for axis in self.axes)]
        return parts.reshape(-1) if self.is_flat else parts


def without_axes(layout: Layout, dims: Sequence[int], *, keep: bool) -> Layout:
    """Returns the layout of a tensor after a reduction over the dimensions `dims`.

    Args:
        keep: whether reduced dimensions stay, with size 1.
    """
    axes = [Axis.whole(1) if dim in dims else axis for dim, axis in enumerate(layout.axes) if keep or dim not in dims]
    return layout.with_axes(tuple(axes), layout.chosen)


_ALL = "all"
_BITS = (1 << 48) - 1


def _hash_tensor(operand: Tensor) -> Tensor:
    """Returns a hash of a tensor's values and their order, as a tensor, without synchronizing with the device."""
    values = torch.view_as_real(operand) if operand.is_complex() else operand
    bits = values.detach().to(torch.float64).contiguous().view(-1).view(torch.int64)
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum() & _BITS


# -- views -------------------------------------------------------------------------------------------------------------

aten = torch.ops.aten

_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default})
VIEWS = frozenset(
    {
        *(aten.select.int, aten.slice.Tensor, aten.permute.default, aten.transpose.int, aten.t.default),
        *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default),
        *(aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default, *_RESHAPES),
    }
)
"""The view ops whose result is a view of each rank's part."""

Dim = tuple[int | None, int, int]
"""A dimension of a view: the axis that it picks indices of, or None if it has no axis; its size; the step."""


def apply_view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], layout: Layout, local: Tensor) -> Any:
    """Applies a view op to this rank's shard, `local`. Returns (layout, shard) of the result, or a list of such pairs.

    Args:
        args: the op's arguments, without the tensor.
        layout: the layout of the viewed tensor.

    Raises:
        NotAView: the result on some rank would not be a view of its shard.
    """
    whole = func(layout.meta(), *args, **kwargs)  # raises torch's errors, and computes shapes
    if func in _RESHAPES:
        return _reshape(layout, local, whole)
    sizes = [axis.size for axis in layout.axes]
    if layout.is_flat:
        if func is not aten.select.int or whole.dim():
            raise NotAView
        index = torch.tensor(arguments_by_name(func, args, kwargs)["index"] % layout.shape.numel())
        element = [int(each) for each in torch.unravel_index(index, sizes)]
        return _locate_view(layout, local.view([len(axis.own) for axis in layout.axes]), whole, [], element)
    # With these axis strides, a view's strides and offset tell which indices of which axis it picks.
    bases = [prod(max(1, size) + 1 for size in sizes[k + 1 :]) for k in range(len(sizes))]
    picked = func(torch.empty_strided(sizes, bases, device="meta"), *args, **kwargs)
    if isinstance(whole, Tensor):
        return _locate_view(
            layout, local, whole, _view_dims(picked, sizes, bases), _mixed_digits(picked.storage_offset(), bases)
        )
    return [
        _locate_view(layout, local, one, _view_dims(other, sizes, bases), _mixed_digits(other.storage_offset(), bases))
        for one, other in zip(whole, picked, strict=True)
    ]


def arguments_by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an op's arguments by name, except the first one. Arguments that the call omits have their defaults."""
    schema = func._schema.arguments[1:]
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    found.update({argument.name: value for argument, value in zip(schema, args, strict=False)})
    return {**found, **kwargs}


def _mixed_digits(number: int, bases: Sequence[int]) -> list[int]:
    """Returns the digits of a number in a mixed-radix system, where a digit at place k has the value `bases[k]`."""
    found = []
    for base in bases:
        digit, number = divmod(number, base)
        found.append(digit)
    return found


def _view_dims(picked: Tensor, sizes: Sequence[int], bases: Sequence[int]) -> list[Dim]:
    """Returns, for each dimension of a view, (the axis whose indices it selects, or None; the dimension's size; its
    step).

    Args:
        picked: the view of a meta tensor.
        sizes: the sizes of the meta tensor's axes.
        bases: the strides of the meta tensor's axes.
    """
    found: list[Dim] = [(None, size, 0) for size in picked.shape]
    free = set(range(len(sizes)))
    # An inserted dimension of size 1 may have the stride of an axis.
    for dim in sorted(range(picked.dim()), key=lambda dim: picked.shape[dim] == 1):
        steps = {k: step for k, step in enumerate(_mixed_digits(picked.stride(dim), bases)) if step}
        if len(steps) == 1 and free.issuperset(steps):
            ((axis, step),) = steps.items()
            free.remove(axis)
            found[dim] = axis, picked.shape[dim], step
    return found


def _locate_view(
    layout: Layout, local: Tensor, whole: Tensor, dims: Sequence[Dim], first: Sequence[int]
) -> tuple[Layout, Tensor]:
    """Returns the layout of a view, and this rank's shard of it.

    Args:
        local: this rank's shard of the viewed tensor, which has this layout.
        whole: a meta tensor with the shape and stride of the view.
        dims: the dimensions of the view, from `_view_dims`.
        first: for each axis of the viewed tensor, the first index that the view contains. It is the only one if the
            view has no dimension for the axis.
    """
    chosen, offset = layout.chosen, local.storage_offset()
    # If the view picks an element of another rank, this rank has no indices, not even on axes that are not sharded.
    is_here = local.dim() == len(layout.axes) and all(axis.of or len(axis.own) == axis.size for axis in layout.axes)
    picked = [axis for axis, *_ in dims]
    for k, (axis, index) in enumerate(zip(layout.axes, first, strict=True)):
        if k in picked:
            continue
        chosen = (*chosen, (axis.of, index)) if axis.of else chosen
        is_here = is_here and index in axis.own
        offset += axis.own.index(index) * local.stride(k) if is_here else 0
    if len(chosen) > len(layout.chosen) and any(k is None and size != 1 for k, size, _ in dims):
        raise NotAView  # a sharded dimension cannot be expanded
    axes, strides = [], []
    for of, size, step in dims:
        if of is None:
            axes.append(Axis.whole(size))
            strides.append(0)
            continue
        axis, own_slice = layout.axes[of], slice(0, None, 1)
        if (first[of], step, size) != (0, 1, axis.size):
            axis, own_slice = axis.slice_axis(slice(first[of], first[of] + size * step, step))
        axes.append(axis)
        strides.append(local.stride(of) * (own_slice.step or 1) if is_here else 0)
        offset += own_slice.start * local.stride(of) if is_here else 0
    own = local.new_empty((0,) * max(1, len(axes)))
    if is_here:
        own = local.as_strided([len(axis.own) for axis in axes], strides, offset)
    else:
        axes = [Axis(axis.size, axis.own[:0], axis.of) for axis in axes]
    return replace(layout, shape=whole.shape, stride=whole.stride(), axes=tuple(axes), chosen=chosen), own


def _reshape(layout: Layout, local: Tensor, whole: Tensor) -> tuple[Layout, Tensor]:
    """Returns (layout, this rank's shard) of a view that merges all dimensions, or restores merged ones.

    Args:
        whole: a meta tensor with the shape and stride of the view.
    """
    sizes = [len(axis.own) for axis in layout.axes]
    is_back = whole.shape == torch.Size(axis.size for axis in layout.axes)
    if not local.numel():
        own = local.new_empty(sizes if is_back and sizes else (0,))
    elif local.is_contiguous():
        own = local.view(sizes if is_back else -1)
    else:
        raise NotAView
    return replace(layout, shape=whole.shape, stride=whole.stride()), own
