"""Stores the gradient of a table shard: as rows, as a dense tensor, or still in flight between ranks.

Shape legend: V' x d this rank's part of the table; K rows with a gradient.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embrace_fx.runtime.kernels import coalesce
from embrace_fx.runtime.tables.local_storage import GradientFuture, LocalStorage, Rows
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.version_snapshot import VersionSnapshot

if TYPE_CHECKING:
    from embrace_fx.runtime.tables.table import Member

_WRITTEN_TOO_LATE = (
    "the values() of a sharded table's sparse gradient were modified after the gradient had been used as a dense "
    "tensor, so the change has no effect. Call values() again, and modify the result."
)


class _ViewToken:
    """A token that each view of a gradient keeps alive. The gradient refers to it weakly, and so detects views."""

    def __init__(self, of: GradientStorage) -> None:
        self.of = weakref.ref(of)


class GradientStorage(LocalStorage):
    """Stores the gradient of a table shard. Aliases of the gradient share the storage. A view, or a write that is not
    element-wise, makes the gradient dense permanently.

    Args:
        like: the table shard (V', d), whose shape and dtype the gradient has.
        siblings: returns the gradients of all sharded tables, in the same order on all ranks.
        no_dense: the reason why the gradient must not become dense, or "" if it may.

    Attributes:
        unreduced: whether this is only this rank's sum of gradients, as under `no_sync`.
        late: (the future that delivers this gradient, the gradient's index in the future), or None once it has arrived.
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
        self._norms: dict[float, Tensor] = {}  # norms of the whole table by order; cleared by writes
        self._seen = VersionSnapshot()  # snapshot of the memory from which `_norms` were computed
        self.late: tuple[GradientFuture[Sequence[Rows]], int] | None = None
        self._rows: list[Rows] = []
        # If dense: the ids of rows with a gradient from lookups, or None for all rows.
        self._read: list[Tensor] | None = None
        # `_are_shown`: whether callers may refer to the stored rows. `_left`: a snapshot of rows that callers got
        # before the gradient became dense, to detect writes into them.
        self._are_shown, self._left = False, VersionSnapshot()
        self._viewer: weakref.ref[_ViewToken] = weakref.ref(_ViewToken(self))

    @property
    def is_in_flight(self) -> bool:
        """Whether the gradient is still being exchanged between ranks."""
        return self.late is not None

    @property
    def is_zero(self) -> bool:
        """Whether nothing was added since the gradient was created or zeroed."""
        return self.late is None and self.local is None and not self._rows

    def waits_for(self, future: GradientFuture[Sequence[Rows]]) -> bool:
        """Returns whether the gradient is still in flight and `future` delivers it."""
        return self.late is not None and self.late[0] is future

    def set_future(self, future: GradientFuture[Sequence[Rows]], k: int) -> None:
        """Makes this gradient the k-th gradient that `future` delivers, without waiting for the future."""
        self.set_zero()
        self.late = future, k

    def wait(self) -> None:
        """Waits for the gradient if it is still in flight. Raises `RuntimeError` if rows from `shown_rows` were written
        after the gradient had become dense, because the change has no effect.
        """
        if self.late is not None:
            late, k = self.late
            self._rows = list(late.now()[k])
            self.late = None
        if self._left.tensors and self._left.written():
            raise RuntimeError(_WRITTEN_TOO_LATE)

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Adds a gradient of some rows: unique ids (K,) and rows (K, d)."""
        self.wait()
        self._norms = {}
        if self.local is None:
            self._rows.append((ids, rows))
            return
        self.local.index_add_(0, ids, rows)
        if self._read is not None:
            self._read.append(ids)

    def set_zero(self) -> None:
        """Sets the gradient to zero. If views of it exist, they become zero too."""
        self.unreduced = False
        if self.local is not None and self._viewer() is not None:
            self.local.zero_()
            self._read = []
            return
        self.late, self._rows, self.local, self._read = None, [], None, None
        self._norms, self._seen, self._left = {}, VersionSnapshot(), VersionSnapshot()

    def set_dense(self, dense: Tensor) -> None:
        """Makes the gradient a dense tensor that uses the memory of `dense`."""
        self._check_dense()
        self.unreduced = False
        self.replace(dense)
        self.late, self._rows, self._read, self._norms = None, [], None, {}

    def add_dense(self, gradient: Tensor) -> None:
        """Adds a gradient of all rows (V', d). If it is the first one, its memory is used."""
        if self.is_zero and self._viewer() is None:
            self.set_dense(gradient)
            return
        self.memory().add_(gradient)
        self._read, self._norms = None, {}

    @property
    def is_dense(self) -> bool:
        """Whether the gradient is stored as a dense tensor. Waits for it."""
        self.wait()
        return self.local is not None

    @property
    def is_of_all_rows(self) -> bool:
        """Whether the gradient is dense and rows that no lookup has read may have a gradient. Waits for it."""
        return self.is_dense and self._read is None

    def rows(self) -> Rows:
        """Returns the gradient as unique ids (K,) and rows (K, d). A dense gradient yields all rows if
        `is_of_all_rows`, otherwise the rows that were read or are not zero.
        """
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
        self._rows = [sum_rows(self._rows)]
        return self._rows[0]

    def dense(self) -> Tensor:
        """Returns the gradient as a dense tensor (V', d), for reading only."""
        self.wait()
        if self.local is not None:
            return self.local
        self._check_dense()
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for ids, rows in self._rows:
            dense.index_add_(0, ids, rows)
        return dense

    def _check_dense(self) -> None:
        """Raises if the gradient is not allowed to become dense."""
        if self._no_dense:
            raise RuntimeError(self._no_dense)

    def memory(self) -> Tensor:
        """Makes the gradient dense permanently, and returns its tensor (V', d)."""
        if not self.is_dense:
            # A caller's later write into the rows would have no effect: the snapshot detects it, and `wait` raises.
            self._left = VersionSnapshot.of_tensors_in(self._handed_out())
            dense, read = self.dense(), [ids for ids, _ in self._rows]
            self._rows, self.local, self._read = [], dense, read
            self._seen = VersionSnapshot.of_tensors_in([dense])  # the values are the same, so the norms stay valid
        assert self.local is not None
        return self.local

    def shown_rows(self) -> Rows | None:
        """Returns the stored ids and rows to write. Returns None if a dense gradient has views or is of all rows."""
        self.wait()
        if self.local is not None and (self._read is None or self._viewer() is not None):
            return None
        rows = self.rows()
        self._rows, self.local, self._read, self._are_shown = [rows], None, None, True
        return rows

    def _handed_out(self) -> tuple[Tensor, ...]:
        """Returns the stored rows if `shown_rows` has returned them and views of the gradient exist, otherwise ()."""
        return tuple([rows for _, rows in self._rows]) if self._are_shown and self._viewer() is not None else ()

    def viewer(self) -> object:
        """Returns the token that views of the gradient keep alive."""
        viewer = self._viewer()
        if viewer is None:
            viewer = _ViewToken(self)
            self._viewer = weakref.ref(viewer)
        return viewer

    def pinned(self) -> Tensor:
        """Returns the gradient as a dense tensor that the caller may keep and write."""
        self._keeps = self.viewer()
        return self.memory()

    def values(self) -> Tensor:
        """Returns the stored elements: a dense tensor (V', d), or rows (K, d). All others are zero."""
        return self.local if self.is_dense and self.local is not None else self.rows()[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies an element-wise function, which maps zero to zero, to the stored elements, in place."""
        if self.is_dense:
            assert self.local is not None
            self.local.copy_(change(self.local))
        elif self._rows:
            ids, rows = self.rows()
            self._rows = [(ids, change(rows))]
            self._norms = {}

    def copied(self) -> GradientStorage:
        self.wait()
        other = copy.copy(self)
        other._rows, other._norms = list(self._rows), dict(self._known_norms())
        other._siblings, other._are_shown, other._left = (lambda: ()), False, VersionSnapshot()
        other._viewer = weakref.ref(_ViewToken(other))
        if self.local is not None:
            other.replace(self.local.clone())
            other._seen = VersionSnapshot.of_tensors_in((other.local,))
            other._read = None if self._read is None else list(self._read)
        return other

    def norm(self, order: float) -> Tensor:
        """Returns the norm of the whole gradient. Collective: the first call reduces the norms of all tables."""
        own = self._known_norms()
        if order not in own:
            known = [held for held in self._siblings() if order not in held._known_norms()]
            asked = known if any(held is self for held in known) else [self]
            for held, norm in zip(asked, _reduce_norms(asked, order), strict=True):
                held._known_norms()[order] = norm
            own = self._norms
        return own[order]

    def _known_norms(self) -> dict[float, Tensor]:
        """Returns the norms computed since the last write, by order."""
        of = self._handed_out() if self.local is None else (self.local,)
        if not self._seen.is_current_for(of) or any(each.is_inference() for each in of):
            self._norms, self._seen = {}, VersionSnapshot.of_tensors_in(of)
        return self._norms

    def own_norm(self, order: float) -> Tensor:
        """Returns the norm of this rank's shard of the gradient."""
        values = self.values() if order >= 0 else self.dense()  # rows without a gradient are zero
        wide = torch.promote_types(self.dtype, torch.float32)  # half precision would overflow at the square of 256
        if values.numel():
            norm: Tensor = torch.linalg.vector_norm(values, order, dtype=wide)
            return norm
        least = order < 0 and abs(order) == float("inf")
        return torch.full((), float("inf") if least else 0.0, dtype=wide, device=self.device)


def sum_rows(parts: Sequence[Rows]) -> Rows:
    """Sums several row gradients (ids, rows) into one, with sorted, unique ids."""
    if len(parts) == 1:
        return parts[0]
    ids, rows = (torch.cat(each) for each in zip(*parts, strict=True))
    unique, summed = coalesce(ids, rows.view(-1), rows.shape[1], (), 1.0)
    return unique, summed


def _reduce_norms(gradients: Sequence[GradientStorage], order: float) -> list[Tensor]:
    """Returns the norms of several gradients over all ranks. Collective."""
    first = gradients[0]
    own = [held.own_norm(order) for held in gradients]
    if first.layout.is_alone:
        return own
    power, reduce_op = norm_reduction(order)
    widest = max((norm.dtype for norm in own), key=lambda dtype: dtype.itemsize)
    joined = torch.stack([norm.pow(power).to(widest) for norm in own])
    first.layout.reduce(joined, reduce_op, "" if joined.is_cuda else "norm")
    return [total.to(norm.dtype).pow(1.0 / power) for total, norm in zip(joined.unbind(), own, strict=True)]


def norm_reduction(order: float) -> tuple[float, dist.ReduceOp.RedOpType]:
    """Returns the power to which each rank raises the norm of its shard, and the reduction of these powers."""
    if abs(order) == float("inf"):
        return 1.0, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
    return order or 1.0, dist.ReduceOp.SUM


# -- the gradients of several parameters ------------------------------------------------------------------------------


class TableGradient:
    """The `.grad` objects of all parameters in a table. One backward fills them, and a later backward may reuse them.

    Attributes:
        holds: whether the memory of the last gradients is still allocated.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        # The gradient objects that the last backward has put into `.grad`.
        self._given: list[tuple[Member, nn.Parameter, TableShard, GradientStorage]] = []
        self._late: GradientFuture[Sequence[Rows]] | None = None  # rows of the last backward
        self._rows: Rows | None = None
        self.holds = False

    def deliver(
        self,
        future: GradientFuture[Sequence[Rows]],
        without_gradient: Collection[str] = (),
        rows: Rows | None = None,
        *,
        unreduced: bool = False,
    ) -> None:
        """Sets the `.grad` of each parameter to its gradient from a future, or adds it to a `.grad` that exists.

        Args:
            without_gradient: names of parameters that get no gradient.
            rows: ids (K,) and rows (K, d) of all parameters, if they have arrived.
            unreduced: whether the gradients are this rank's own sums, not yet reduced.
        """
        if not without_gradient and self._are_free():
            for k, (_, parameter, part, held) in enumerate(self._given):
                held.late, held.unreduced = (future, k), unreduced
                parameter.grad = part
        else:
            for k, member in enumerate(self._members):
                if member.name not in without_gradient:
                    member.add_future_gradient(future, k, unreduced=unreduced)
            self._given = self._reusable_gradients(future)
        self._late, self._rows, self.holds = (future, rows, True) if self._given else (None, None, False)

    def _reusable_gradients(
        self, late: GradientFuture[Sequence[Rows]]
    ) -> list[tuple[Member, nn.Parameter, TableShard, GradientStorage]]:
        """Returns (table, parameter, `.grad`, its storage) of each parameter for later backwards to reuse. Returns []
        if any `.grad` contains more than the gradient that `late` delivers.
        """
        found = []
        for member in self._members:
            part = member.parameter.grad
            held = part.held if isinstance(part, TableShard) else None
            if not isinstance(part, TableShard) or not isinstance(held, GradientStorage) or not held.waits_for(late):
                return []
            found.append((member, member.parameter, part, held))
        return found

    def _are_free(self) -> bool:
        """Returns whether no code has read the gradient objects or refers to them, so that they can be reused."""
        late, (alone, of_gradient) = self._late, _ALONE
        for member, parameter, part, held in self._given:
            if member.parameter is not parameter or parameter.grad is not None:
                return False
            if held.late is None or held.late[0] is not late or part._use_count() != 1:  # type: ignore[attr-defined]
                return False
            if getrefcount(part) != alone or getrefcount(held) != of_gradient:
                return False
        return bool(self._given)

    def free_dropped(self) -> None:
        """Frees the memory of gradients that the training loop no longer refers to."""
        if self._are_free():
            self._late, self._rows, self.holds = GradientFuture(tuple), None, False
            for k, (_, _, _, held) in enumerate(self._given):
                held.late = self._late, k

    def count_in_flight(self, late: GradientFuture[Sequence[Rows]]) -> int:
        """Returns how many parameters' `.grad` still waits for this future."""
        if late is self._late and self._given:
            for member, parameter, part, held in self._given:
                is_same = member.parameter is parameter and parameter.grad is part
                if not is_same or held.late is None or held.late[0] is not late:
                    break
            else:
                return len(self._members)
        return sum([member.waits_for(late) for member in self._members])

    def rows(self) -> Rows | None:
        """Returns ids and rows of the gradient of all parameters, or None if the loop has changed a `.grad`."""
        if self._rows is None or self._late is None or self.count_in_flight(self._late) < len(self._members):
            self._rows = None
        return self._rows


def _expected_references() -> tuple[int, int]:
    """Returns the reference counts of a gradient and of its storage that no other code refers to."""
    made: Any = torch.empty(0, device="cpu")
    made.held = object()
    given = [(None, None, made, made.held)]
    del made
    for _, _, part, held in given:
        return getrefcount(part), getrefcount(held)
    raise AssertionError


_ALONE = _expected_references()
