"""The slots of a working set by the next use of their rows: those without a known one first, then the farthest.

Contract
    A slot's mark is the last call that used it or, where a later step is known to, one above all calls, the lower the
    farther that step. Slots that stay have marks above these, and nobody's have the highest.

Shape legend: S slots; K of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FREE = torch.iinfo(torch.int64).max
_SOON = _FREE // 2
"""A slot's mark, less the number of its next known step; more than it: of slots that stay."""
_KNOWN = _SOON // 2
"""Marks above this: slots whose next step is known."""
_SHARE = 64
"""Slots emptied at a time, those least recently used: a 64th of all."""


class EvictionPolicy:
    """The marks of slots.

    Attributes:
        step: the number of the one that has begun.
    """

    def __init__(self, slots: int) -> None:
        self._marks = torch.full((slots,), _FREE, dtype=torch.int64, device="cpu")
        self.step, self._call = 0, 0
        self._before, self._began = 0, 0  # the last calls before the step before this one, and before this one

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._marks.nbytes

    def begin_step(self, number: int) -> None:
        """Begins a step: what has been read for earlier ones may go."""
        self.step = number
        self._before, self._began = self._began, self._call

    def begin_call(self) -> None:
        """Begins a call."""
        self._call += 1

    def use(self, slots: Tensor) -> None:
        """Marks slots (K,) that this call uses."""
        marks = self._marks.index_select(0, slots)
        known = (marks > _KNOWN) & (marks < _SOON - self.step)
        self._marks.index_copy_(0, slots, torch.where(known, marks, self._call))

    def keep(self, slots: Tensor) -> None:
        """Has slots (K,) stay until they may go again."""
        marks = self._marks.index_select(0, slots)
        self._marks.index_copy_(0, slots, torch.where(marks > _SOON, marks, marks + _SOON))

    def let_go(self, slots: Tensor) -> None:
        """Has slots (K,) go when they would if they had not stayed."""
        marks = self._marks.index_select(0, slots)
        self._marks.index_copy_(0, slots, torch.where(marks > _SOON, marks - _SOON, marks))

    def expect(self, slots: Tensor, due: int) -> None:
        """Marks slots (K,) that step number `due` will use."""
        self._marks.index_fill_(0, slots, _SOON - due)

    def give_back(self, slots: Tensor) -> None:
        """Marks slots (K,) as free: they hold no row any more."""
        self._marks.index_fill_(0, slots, _FREE)

    def first_to_go(self, count: int, due: int | None = None) -> tuple[Tensor, bool]:
        """Returns slots (K,) of about `count` rows that go first, and whether there may be others that may go, too.

        Args:
            due: they are not used before that step, and have not been since the step before this one; None: they may
                be.
        """
        # Of an earlier step: their gradients may be still to come, so that they go when others do that were used then.
        self._marks.masked_fill_((self._marks > _SOON - self.step) & (self._marks <= _SOON), self._call)
        marks, slots = self._marks.topk(max(count, len(self._marks) // _SHARE), largest=False)
        if due is None:
            may_go = marks <= _SOON
        else:
            may_go = (marks < _SOON - due) & ((marks <= self._before) | (marks > _KNOWN))
        return slots[may_go], bool(may_go.all())
