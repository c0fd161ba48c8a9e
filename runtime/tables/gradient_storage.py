"""The memory behind a part of a table's gradient: rows, all elements, or a launch in flight.

Shape legend: V' x d this rank's part of the table; K rows with gradient.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.kernels import coalesce
from embrace_fx.runtime.tables.local_storage import GradientFuture, LocalStorage, Rows
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.vocabulary.as_seen import AsSeen

_WRITTEN_TOO_LATE = (
    "the values() of a sharded table's sparse gradient were written after it was used as a dense tensor, which no "
    "longer changes the gradient. Ask it for values() again, and write those."
)


class _Viewer:
    """Kept by the views of a gradient.

    Args:
        of: the gradient.
    """

    def __init__(self, of: GradientStorage) -> None:
        self.of = weakref.ref(of)


class GradientStorage(LocalStorage):
    """Memory of a gradient: rows, all elements, or a launch in flight. Aliases of one gradient share it.

    Whoever views it, or writes into it by anything but element by element, makes it dense for good.

    Args:
        like: this rank's part (V', d).
        layout: the table's.
        siblings: the gradients that other tables have, in the same order on all ranks.
        no_dense: why it cannot be dense; "": it can.

    Attributes:
        unreduced: whether it is of backwards under `no_sync` alone, of this rank.
        late: what it is on its way with, and which of those it is; None: it is here.
    """

    of_gradient, unreduced = True, False

    def __init__(
        self,
        like: Tensor,
        layout: Layout,
        siblings: Callable[[], Sequence[GradientStorage]] = lambda: (),
        no_dense: str = "",
    ) -> None:
        super().__init__(like)
        self.local = None
        self._no_dense = no_dense
        self.layout = layout
        self._siblings = siblings
        self._norms: dict[float, Tensor] = {}  # of the whole table, by order, as long as nothing is written
        self._seen = AsSeen()  # its memory, as the norms are of it
        self.late: tuple[GradientFuture[Sequence[Rows]], int] | None = None  # and which of those it is
        self._rows: list[Rows] = []
        self._read: list[Tensor] | None = None  # of a dense one, rows that lookups gave a gradient; None: all
        self._is_zero = True
        self._are_shown, self._left = False, AsSeen()  # someone may write the rows, or those that were copied since
        self._viewer: weakref.ref[_Viewer] = weakref.ref(_Viewer(self))

    @property
    def is_late(self) -> bool:
        """Whether it is on its way, and nobody has looked at it."""
        return self.late is not None

    @property
    def is_zero(self) -> bool:
        """Whether it has been zeroed, or never been anything else."""
        return self._is_zero and self.late is None

    def waits_for(self, late: GradientFuture[Sequence[Rows]]) -> bool:
        """Whether it is one of these, and nobody has looked at it."""
        return self.late is not None and self.late[0] is late

    def will_be(self, late: GradientFuture[Sequence[Rows]], k: int) -> None:
        """Makes it the k-th of gradients on their way."""
        self.set_zero()
        self.late, self._is_zero = (late, k), False

    def wait(self) -> None:
        """Waits for what is on its way.

        Raises:
            RuntimeError: rows have been written that are no longer its memory.
        """
        if self.late is not None:
            late, k = self.late
            self._rows = list(late.now()[k])
            self.late = None
        if self._left.tensors and self._left.written():
            raise RuntimeError(_WRITTEN_TOO_LATE)

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Adds a row gradient, its ids unique."""
        self.wait()
        self._changed()
        if self.local is None:
            self._rows.append((ids, rows))
            return
        self.local.index_add_(0, ids, rows)
        if self._read is not None:
            self._read.append(ids)

    def _changed(self) -> None:
        self._norms, self._is_zero = {}, False

    def set_zero(self) -> None:
        """Makes it zero, in its memory if there are views of it."""
        self.unreduced = False
        if self.local is not None and self._viewer() is not None:
            self.local.zero_()
            self._read = []
            return
        self.late, self._rows, self.local, self._read, self._is_zero = None, [], None, None, True
        self._norms, self._seen, self._left = {}, AsSeen(), AsSeen()

    def set_dense(self, dense: Tensor) -> None:
        """Makes the gradient dense, with a tensor as its memory."""
        self._check_dense()
        self.unreduced = False
        self.replace(dense)
        self.late, self._rows, self._read = None, [], None
        self._changed()

    def add_dense(self, gradient: Tensor) -> None:
        """Adds a gradient of all rows (V', d), which becomes its memory where there is none yet."""
        if self.is_zero and self._viewer() is None:
            self.set_dense(gradient)
            return
        self.memory().add_(gradient)
        self._read = None
        self._changed()

    @property
    def is_dense(self) -> bool:
        self.wait()
        return self.local is not None

    @property
    def is_of_all_rows(self) -> bool:
        """Whether rows without a gradient of a lookup have one."""
        return self.is_dense and self._read is None

    def rows(self) -> Rows:
        """Returns the gradient, coalesced; of a dense one the rows that are read or not zero."""
        self.wait()
        if self.local is not None and self._read is None:
            return torch.arange(self.shape[0], device=self.device), self.local
        if self.local is not None:
            assert self._read is not None
            ids = torch.cat([*self._read, self.local.ne(0).any(dim=1).nonzero().view(-1)]).unique()
            return ids, self.local.index_select(0, ids)
        if not self._rows:
            empty = torch.empty(0, dtype=torch.int64, device=self.device)
            return empty, torch.empty((0, *self.shape[1:]), dtype=self.dtype, device=self.device)
        self._rows = [merged(self._rows)]
        return self._rows[0]

    def dense(self) -> Tensor:
        """Returns the gradient (V', d), to be read."""
        self.wait()
        if self.local is not None:
            return self.local
        self._check_dense()
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for ids, rows in self._rows:
            dense.index_add_(0, ids, rows)
        return dense

    def _check_dense(self) -> None:
        if self._no_dense:
            raise RuntimeError(self._no_dense)

    def memory(self) -> Tensor:
        """Makes the gradient dense for good, and returns it, (V', d)."""
        if not self.is_dense:
            self._left = AsSeen.of(self._shown())  # whoever has these rows must not write them any more
            dense, read = self.dense(), [ids for ids, _ in self._rows]
            self._rows, self.local, self._read, self._is_zero = [], dense, read, False
            self._seen = AsSeen.of([dense])  # the norms are of the same values
        assert self.local is not None
        return self.local

    def shown_rows(self) -> Rows | None:
        """Returns its rows, in memory that whoever has them may write; None: views of all elements are held."""
        self.wait()
        if self.local is not None and (self._read is None or self._viewer() is not None):
            return None
        rows = self.rows()
        self._rows, self.local, self._read, self._are_shown = [rows], None, None, True
        return rows

    def _shown(self) -> tuple[Tensor, ...]:
        """Lists the memory that `shown_rows` has given away."""
        return tuple([rows for _, rows in self._rows]) if self._are_shown and self._viewer() is not None else ()

    def viewer(self) -> object:
        """Returns an object that views of it keep."""
        viewer = self._viewer()
        if viewer is None:
            viewer = _Viewer(self)
            self._viewer = weakref.ref(viewer)
        return viewer

    def pinned(self) -> Tensor:
        """Its memory, which someone keeps as long as it is there."""
        self._keeps = self.viewer()
        return self.memory()

    def values(self) -> Tensor:
        """Elements of which all others are zero."""
        return self.local if self.is_dense and self.local is not None else self.rows()[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes each element by itself, where zero stays zero. What a step has taken by rows is not changed."""
        if self.is_dense:
            assert self.local is not None
            self.local.copy_(change(self.local))
        elif self._rows:
            ids, rows = self.rows()
            self._rows = [(ids, change(rows))]
            self._norms = {}

    def copied(self) -> GradientStorage:
        """The same, apart."""
        self.wait()
        other = copy.copy(self)
        other._rows, other._norms = list(self._rows), dict(self._known_norms())
        other._siblings, other._are_shown, other._left = (lambda: ()), False, AsSeen()
        other._viewer = weakref.ref(_Viewer(other))
        if self.local is not None:
            other.replace(self.local.clone())
            other._seen = AsSeen.of((other.local,))
            other._read = None if self._read is None else list(self._read)
        return other

    def norm(self, order: float) -> Tensor:
        """Computes the norm over the whole table. Collective: one reduction serves all tables, as clipping asks."""
        own = self._known_norms()
        if order not in own:
            known = [held for held in self._siblings() if order not in held._known_norms()]
            asked = known if any(held is self for held in known) else [self]
            for held, norm in zip(asked, _whole_norms(asked, order), strict=True):
                held._known_norms()[order] = norm
            own = self._norms
        return own[order]

    def _known_norms(self) -> dict[float, Tensor]:
        """Norms of the present values, by order; empties the dict after a write."""
        of = self._shown() if self.local is None else (self.local,)
        if not self._seen.is_of(of) or any(each.is_inference() for each in of):
            self._norms, self._seen = {}, AsSeen.of(of)
        return self._norms

    def own_norm(self, order: float) -> Tensor:
        """Computes the norm over this rank's part."""
        values = self.values() if order >= 0 else self.dense()  # the smallest one is zero where a row has none
        wide = torch.promote_types(self.dtype, torch.float32)  # half precision would overflow at the square of 256
        if values.numel():
            norm: Tensor = torch.linalg.vector_norm(values, order, dtype=wide)
            return norm
        least = order < 0 and abs(order) == float("inf")
        return torch.full((), float("inf") if least else 0.0, dtype=wide, device=self.device)


def merged(parts: Sequence[Rows]) -> Rows:
    """Sums row gradients, each with unique ids, into one whose ids are sorted."""
    if len(parts) == 1:
        return parts[0]
    ids, rows = (torch.cat(each) for each in zip(*parts, strict=True))
    unique, summed = coalesce(ids, rows.view(-1), rows.shape[1], (), 1.0)
    return unique, summed


def _whole_norms(asked: Sequence[GradientStorage], order: float) -> list[Tensor]:
    """Norms of tables, of each rank's parts of them."""
    first = asked[0]
    own = [held.own_norm(order) for held in asked]
    if first.layout.is_alone:
        return own
    if abs(order) == float("inf"):
        return _together(first, own, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN)
    if order == 0:
        return _together(first, own, dist.ReduceOp.SUM)
    return [total.pow(1.0 / order) for total in _together(first, [norm.pow(order) for norm in own], dist.ReduceOp.SUM)]


def _together(held: GradientStorage, values: Sequence[Tensor], reduce_op: dist.ReduceOp.RedOpType) -> list[Tensor]:
    """Numbers reduced at once, in the widest of their types."""
    widest = max((value.dtype for value in values), key=lambda dtype: dtype.itemsize)
    joined = torch.stack([value.to(widest) for value in values])
    held.layout.reduce(joined, reduce_op, "" if joined.is_cuda else "norm")
    return [total.to(value.dtype) for total, value in zip(joined.unbind(), values, strict=True)]
