"""Layouts: which elements of a table, of a view of it, or of its optimizer state this rank has.

By columns, a rank has the columns that torch.chunk gives it, which `torch.distributed.checkpoint` can re-shard. On a
`Grid`, a rank has some columns of the rows with id % rows == r.

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
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embrace_fx.runtime.ranks.backends import goes_through_host
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.gathering import all_gather_single
from embrace_fx.runtime.ranks.messages import receive_one, send_one
from embrace_fx.vocabulary.ops import own_columns
from embrace_fx.vocabulary.plan import Grid

E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class Axis:
    """One dimension of a tensor, with the range of its indices that this rank has.

    Attributes:
        of: (which dimension of the table this is, the number of ranks that share its indices). Empty if every rank has
            all indices.
    """

    size: int
    own: range
    of: tuple[str, int] | tuple[()] = ()

    @classmethod
    def whole(cls, size: int) -> Axis:
        """Returns an axis of `size` indices that is not sharded: every rank has all indices."""
        return cls(size, range(size))

    @property
    def index(self) -> slice:
        """This rank's indices as a slice."""
        return slice(self.own.start, self.own.stop, self.own.step) if len(self.own) else slice(0, 0)

    def reduced(self) -> Axis:
        """Returns the axis after each rank has reduced its indices to one."""
        if not self.of:
            return Axis.whole(1)
        each = -(-self.size // self.of[1]) if self.own.step == 1 else 1  # consecutive indices per rank
        count = -(-self.size // each) if self.own.step == 1 else min(self.size, self.of[1])
        at = self.own.start // each
        return Axis(count, range(at, at + 1) if self.own else range(0), self.of)


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
        operands: a hash of the other operands from which the elements were computed, to detect operands that differ
            between ranks.
    """

    name: str
    mesh: DeviceMesh | None
    communicator: Callable[[], Communicator | None]
    shape: torch.Size
    stride: tuple[int, ...]
    axes: tuple[Axis, ...]
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
            axes = tuple([Axis(size, range(size)[own], (dim, n) if n > 1 else ()) for dim, size, own, n in parts])
        known = communicator()
        group = known.group if known is not None else None
        return cls(name, mesh, communicator, shape, (), (), group=group).with_axes(axes)

    def with_axes(self, axes: tuple[Axis, ...]) -> Layout:
        """Returns the layout of a contiguous tensor with these dimensions, over the same ranks."""
        shape = torch.Size(axis.size for axis in axes)
        return replace(self, shape=shape, stride=torch.empty(shape, device="meta").stride(), axes=axes)

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

    @property
    def sharded(self) -> list[int]:
        """The dimensions of which this rank does not have all indices."""
        return [dim for dim, axis in enumerate(self.axes) if axis.of]

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
            asked: the operation's name, for errors and to check that all ranks request the same; "" to check nothing.
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
        """Returns this layout for an op's result, with a hash of the op's operands: of sharded ones the layouts, of
        others the tensors and Python numbers.
        """
        if self.mesh is None:
            return self
        found = sum(each.operands for each in others) + sum(map(_hash_tensor, operands))
        found += hash(tuple(numbers)) & _BITS if numbers else 0
        return replace(self, operands=found & _BITS)

    def _describe_request(self, asked: str) -> str:
        """Describes a request for an error message. Ranks with equal requests get equal text."""
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
        """Reports an error to ranks that may be waiting, and returns it. Raises `RuntimeError` in a forked child."""
        if (communicator := self.communicator()) is not None and not self.is_alone:
            communicator.check_fork()
            communicator.refuse(str(error))
        return error

    def wait_for_ranks(self) -> None:
        """Waits until all ranks have requested the whole tensor. Collective."""
        self.reduce(torch.zeros(1, device="cpu"), dist.ReduceOp.SUM, _ALL)

    def whole(self, own: Tensor, asked: str = "all") -> Tensor:
        """Gathers the shards of all ranks into the whole tensor. `asked` is as for `reduce`. Collective."""
        if self.mesh is None or not self.sharded:
            return own.detach().clone()
        if self.shape.numel() and self.mesh.ndim == 1:
            return self._gathered(own, self.sharded[0], asked)
        whole = torch.zeros(self.shape, dtype=own.dtype, device=own.device)
        self.cut(whole).copy_(own)
        # Each element is nonzero on one rank. Sum bytes, because a sum of floats would lose the sign of -0.0.
        self.reduce(whole.view(-1).view(torch.uint8), dist.ReduceOp.SUM, asked)
        return whole

    def gather_ids(self, ids: Tensor) -> tuple[Tensor, slice]:
        """Concatenates the ids (K,) of all ranks. Returns them, and the slice that has this rank's ids. Collective."""
        assert self.mesh is not None
        ranks = self.mesh.mesh.flatten().tolist()
        at, count = ranks.index(self.mesh.get_rank()), len(ids)
        counts = torch.zeros(len(ranks), dtype=torch.int64, device=ids.device)
        counts[at] = count
        ends = self.reduce(counts, dist.ReduceOp.SUM, "rows").cumsum(0).tolist()
        mine = slice(ends[at] - count, ends[at])
        every = ids.new_zeros(ends[-1])
        every[mine] = ids
        return self.reduce(every, dist.ReduceOp.SUM, "rows"), mine

    def _gathered(self, part: Tensor, dim: int, asked: str) -> Tensor:
        """Gathers and concatenates the shards along the sharded dimension `dim`. The last ranks may have less."""
        assert self.mesh is not None
        sizes, part = list(self.shape), part.movedim(dim, 0)
        size, ranks = sizes.pop(dim), self.mesh.size()
        sent = part.new_zeros((-(-size // ranks), *sizes))
        sent[: len(part)] = part
        flat, communicator = sent.view(-1).view(torch.uint8), self.communicator()
        if communicator is not None and communicator.is_open:
            everyone = communicator.gather_for_read(flat, self._describe_request(asked))
        else:  # the model has been closed or deleted
            everyone = flat.new_empty((ranks * flat.numel(),))
            all_gather_single(everyone, flat, group=self.mesh.get_group())
        return everyone.view(part.dtype).view(-1, *sizes)[:size].movedim(0, dim).contiguous()

    def fits(self, other: Layout) -> bool:
        """Returns whether two layouts give each rank the same elements."""
        mine, theirs = ([(axis.size, axis.of) for axis in each.axes] for each in (self, other))
        return mine == theirs

    def meta(self, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a meta tensor with the shape and stride of the whole tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device="meta")

    def cut(self, whole: Tensor) -> Tensor:
        """Returns this rank's shard of a whole tensor, as a view."""
        return whole[tuple(axis.index for axis in self.axes)]


_ALL = "all"
_BITS = (1 << 48) - 1


def _hash_tensor(operand: Tensor) -> Tensor:
    """Returns a hash of a tensor's values and their order, as a tensor, without synchronizing with the device."""
    values = torch.view_as_real(operand) if operand.is_complex() else operand
    bits = values.detach().to(torch.float64).contiguous().view(-1).view(torch.int64)
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum() & _BITS


def own_elements(operand: Tensor, axes: tuple[Axis, ...], layout: Layout) -> Tensor:
    """Returns the elements of an operand that this rank needs for its elements of an element-wise op's result.

    Args:
        operand: this rank's elements of a shard, or a whole tensor, with these axes.
        layout: the layout of the result.
    """
    index = [slice(None)] * len(axes)
    for dim, (axis, wanted) in enumerate(zip(axes, layout.axes[len(layout.axes) - len(axes) :], strict=True)):
        if axis.size == wanted.size and axis.own != wanted.own:
            index[dim] = wanted.index
    return operand[tuple(index)] if any(each != slice(None) for each in index) else operand


def arguments_by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an op's arguments by name, except the first one, with defaults for those that the call omits."""
    schema = func._schema.arguments[1:]
    found = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    found.update({argument.name: value for argument, value in zip(schema, args, strict=False)})
    return {**found, **kwargs}


# -- tables ------------------------------------------------------------------------------------------------------------

Slices = tuple[slice, slice]
"""Slices of a table's rows and columns."""


def make_mesh(communicator: Communicator, device_type: str, grid: Grid | None) -> DeviceMesh | None:
    """Returns the device mesh over which tables are sharded on `grid`, or by columns if `grid` is None. Returns None
    for a single process. The first call for a grid is collective, because it makes process groups.
    """
    group = communicator.group
    if group is None or communicator.world_size == 1:
        return None
    if grid is None:
        return DeviceMesh.from_group(group, device_type)
    found = communicator.meshes.get((device_type, grid))
    if found is None:
        ranks = torch.tensor(dist.get_process_group_ranks(group), device="cpu").view(grid.rows, grid.columns)
        along = {f"a column of a {grid}": ranks.t().tolist(), f"a row of a {grid}": ranks.tolist()}
        groups = [communicator.sub_group(name, parts) for name, parts in along.items()]
        found = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("rows", "columns"))
        communicator.meshes[device_type, grid] = found
    return found


def owned_slices(shape: Sequence[int], grid: Grid, rank: int) -> Slices:
    """Returns the slices of rows and of columns of a table (V, D) that `rank` owns on a grid."""
    return grid.own_rows(shape[0], rank), slice(*own_columns(shape[1], grid.columns, grid.place(rank)[1]))


def own_slices(shape: Sequence[int], mesh: DeviceMesh) -> Slices:
    """Returns the slices of rows and of columns of a table that this rank owns on a mesh."""
    # Do not use the mesh's groups: torch may return an equal mesh whose groups are destroyed.
    place = mesh.get_coordinate()
    assert place is not None
    grid = Grid(*mesh.shape) if mesh.ndim > 1 else Grid(1, mesh.size())
    return owned_slices(shape, grid, place[0] * grid.columns + place[1] if mesh.ndim > 1 else place[0])


def scatter_table(table: Tensor, group: dist.ProcessGroup, grid: Grid | None) -> Tensor:
    """Scatters rank 0's table (V, D) on a grid, or by columns. Returns this rank's shard (V', d). Collective.

    Args:
        table: the table on rank 0; on other ranks, any tensor of its shape, dtype and device type.
    """
    if goes_through_host(table, group):
        return scatter_table(table.cpu(), group, grid).to(table.device)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = [owned_slices(table.shape, grid or Grid(1, size), r) for r in range(size)]
    if rank > 0:
        own = torch.empty_like(table[parts[rank]], memory_format=torch.contiguous_format)
        if own.numel():
            receive_one(own, 0, group)
        return own
    # Send point to point, because scatter needs equal sizes, and shards may differ in size or be empty.
    for r in range(1, size):
        piece = table[parts[r]].contiguous()
        if piece.numel():
            send_one(piece, r, group)
    return table[parts[0]].clone(memory_format=torch.contiguous_format)
