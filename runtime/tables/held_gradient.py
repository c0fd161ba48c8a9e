"""What the gradient of a sharded table holds: rows, all elements, or what is still on its way.

Shape legend: V' x d this rank's part of the table; K rows with gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.kernels import coalesce
from embrace_fx.runtime.ranks.communicator import Communicator

Rows = tuple[Tensor, Tensor]
"""ids (K,), rows (K, d)."""


class HeldGradient:
    """What a gradient holds: rows, all elements, or what is on its way. Aliases of one gradient share it.

    Args:
        like: this rank's part (V', d).
        communicator: the ranks that have the other parts; None: there are none.
        siblings: the gradients that other tables have, in the same order on all ranks.

    Attributes:
        source: what it waits for, or waited for last.
    """

    def __init__(
        self,
        like: Tensor,
        communicator: Communicator | None,
        siblings: Callable[[], Sequence[HeldGradient]] = lambda: (),
    ) -> None:
        self.shape, self.dtype, self.device = like.shape, like.dtype, like.device
        self.communicator = communicator
        self.source: object = None
        self._siblings = siblings
        self._norms: dict[float, Tensor] = {}  # of the whole table, by order, as long as nothing changes it
        self._late: Callable[[], Sequence[Rows]] | None = None
        self._rows: list[Rows] = []
        self._dense: Tensor | None = None
        self._is_zero = True

    @property
    def is_late(self) -> bool:
        """Whether it is on its way, and nobody has looked at it."""
        return self._late is not None

    @property
    def is_zero(self) -> bool:
        """Whether it has been zeroed, or never been anything else."""
        return self._is_zero and self._late is None

    def will_be(self, late: Callable[[], Sequence[Rows]], source: object) -> None:
        """Leaves it to `late` to wait for the gradient; `source` says of which one."""
        self.set_zero()
        self._late, self._is_zero, self.source = late, False, source

    def land(self) -> None:
        """Waits for what is on its way."""
        if (late := self._late) is not None:
            self._late = None
            self._rows = list(late())

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Adds a row gradient, its ids unique."""
        self.land()
        self._norms, self._is_zero = {}, False
        if self._dense is not None:
            self._dense = self._dense.index_add(0, ids, rows)
        else:
            self._rows.append((ids, rows))

    def set_zero(self) -> None:
        self._norms = {}
        self._late, self._rows, self._dense, self._is_zero = None, [], None, True

    def set_dense(self, dense: Tensor) -> None:
        self._norms = {}
        self._late, self._rows, self._dense, self._is_zero = None, [], dense, False

    @property
    def is_dense(self) -> bool:
        """Whether rows without a gradient of a lookup may have one."""
        self.land()
        return self._dense is not None

    def rows(self) -> Rows:
        """The gradient, coalesced; all rows where it is dense."""
        self.land()
        if self._dense is not None:
            return torch.arange(self.shape[0], device=self.device), self._dense
        if not self._rows:
            empty = torch.empty(0, dtype=torch.int64, device=self.device)
            return empty, torch.empty((0, *self.shape[1:]), dtype=self.dtype, device=self.device)
        if len(self._rows) > 1:
            ids = torch.cat([ids for ids, _ in self._rows])
            rows = torch.cat([rows for _, rows in self._rows])
            merged = coalesce(ids, rows.view(-1), rows.shape[1], -1, 1.0)
            self._rows = [(merged[0], merged[1])]
        return self._rows[0]

    def dense(self) -> Tensor:
        """The gradient (V', d)."""
        self.land()
        if self._dense is not None:
            return self._dense
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for ids, rows in self._rows:
            dense.index_add_(0, ids, rows)
        return dense

    def values(self) -> Tensor:
        """Elements of which all others are zero."""
        return self._dense if self.is_dense and self._dense is not None else self.rows()[1]

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes each element by itself, where zero stays zero. What a step has taken is not changed."""
        self._norms = {}
        if self.is_dense:
            assert self._dense is not None
            self._dense = change(self._dense)
        elif self._rows:
            ids, rows = self.rows()
            self._rows = [(ids, change(rows))]

    def copied(self) -> HeldGradient:
        """The same, apart."""
        self.land()
        other = copy.copy(self)
        other._rows, other._norms = list(self._rows), dict(self._norms)
        other._siblings = lambda: ()
        return other

    def reduce(self, value: Tensor, reduce_op: dist.ReduceOp.RedOpType) -> Tensor:
        """A rank's number, made one of the whole table's. Collective."""
        return value if self.communicator is None else self.communicator.reduce_scalar(value, reduce_op)

    def norm(self, order: float) -> Tensor:
        """Of the whole table. Collective: one reduction serves all tables, for who asks for one clips them all."""
        if order not in self._norms:
            known = [held for held in self._siblings() if order not in held._norms]
            asked = known if any(held is self for held in known) else [self]
            for held, norm in zip(asked, _whole_norms(asked, order), strict=True):
                held._norms[order] = norm
        return self._norms[order]

    def own_norm(self, order: float) -> Tensor:
        """Of this rank's part."""
        values = self.values() if order >= 0 else self.dense()  # the smallest one is zero where a row has none
        wide = torch.promote_types(self.dtype, torch.float32)  # half precision would overflow at the square of 256
        if values.numel():
            norm: Tensor = torch.linalg.vector_norm(values, order, dtype=wide)
            return norm
        least = order < 0 and abs(order) == float("inf")
        return torch.full((), float("inf") if least else 0.0, dtype=wide, device=self.device)

    def elements(self) -> int:
        """Of the whole table. Collective."""
        own = torch.tensor(float(self.shape.numel()), dtype=torch.float64, device=self.device)
        return int(self.reduce(own, dist.ReduceOp.SUM))


def _whole_norms(asked: Sequence[HeldGradient], order: float) -> list[Tensor]:
    """Norms of tables, of each rank's parts of them."""
    first = asked[0]
    own = [held.own_norm(order) for held in asked]
    if first.communicator is None or first.communicator.world_size == 1:
        return own
    if abs(order) == float("inf"):
        return _together(first, own, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN)
    if order == 0:
        return _together(first, own, dist.ReduceOp.SUM)
    return [total.pow(1.0 / order) for total in _together(first, [norm.pow(order) for norm in own], dist.ReduceOp.SUM)]


def _together(held: HeldGradient, values: Sequence[Tensor], reduce_op: dist.ReduceOp.RedOpType) -> list[Tensor]:
    """Numbers reduced at once, in the widest of their types."""
    widest = max((value.dtype for value in values), key=lambda dtype: dtype.itemsize)
    joined = held.reduce(torch.stack([value.to(widest) for value in values]), reduce_op)
    return [total.to(value.dtype) for total, value in zip(joined.unbind(), values, strict=True)]
