"""Chooses which rows to evict from memory: first rows without a known next use, then those used latest.

Contract
    A slot's mark is the number of the last call that used it. If a later step is known to use it, the mark is above all
    call numbers, and lower for a farther step. Pinned and free slots have higher marks.

Shape legend: S slots; K some of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_FREE = torch.iinfo(torch.int64).max
_SOON = _FREE // 2
"""A mark is this minus the slot's next known step. Pinned slots have higher marks."""
_KNOWN = _SOON // 2
"""Slots whose next step is known have marks above this."""
_SHARE = 64
"""At least this fraction of the slots, a 64th, is evicted at a time."""


class EvictionPolicy:
    """Decides which slots (places for one row each in memory) to evict, and keeps the list `free` of free slots."""

    def __init__(self, slots: int) -> None:
        self._marks = torch.full((slots,), _FREE, dtype=torch.int64, device="cpu")
        self.free = torch.arange(slots, dtype=torch.int32, device="cpu")
        self.step, self._call = 0, 0
        self._before, self._began = 0, 0  # the numbers of the last call before the previous step, and before this step

    @property
    def nbytes(self) -> int:
        """The bytes of memory that the policy needs at most."""
        return self._marks.nbytes + 4 * len(self._marks)

    def begin_step(self, step_number: int) -> None:
        self.step = step_number
        self._before, self._began = self._began, self._call

    def begin_call(self) -> None:
        """Begins a call of the model. Slots that it uses count as the most recently used."""
        self._call += 1

    def use(self, slots: Tensor) -> None:
        """Marks memory slots (K,) as used by the current call."""
        marks = self._marks.index_select(0, slots)
        known = (marks > _KNOWN) & (marks < _SOON - self.step)
        self._marks.index_copy_(0, slots, torch.where(known, marks, self._call))

    @contextlib.contextmanager
    def pinned(self, slots: Tensor) -> Iterator[None]:
        """Opens a context in which memory slots (K,) are not evicted."""
        marks = self._marks.index_select(0, slots)
        self._marks.index_fill_(0, slots, _FREE - 1)
        try:
            yield
        finally:
            self._marks.index_copy_(0, slots, marks)

    def expect(self, slots: Tensor, due: int) -> None:
        """Records that step `due` will use memory slots (K,)."""
        self._marks.index_fill_(0, slots, _SOON - due)

    def take_free(self, count: int) -> Tensor:
        """Removes `count` memory slots from the list of free slots, and returns them."""
        left = len(self.free) - count
        taken, self.free = self.free[left:].to(torch.int64), self.free[:left]
        return taken

    def free_slots(self, slots: Tensor) -> None:
        """Adds memory slots (K,) to the list of free slots."""
        self._marks.index_fill_(0, slots, _FREE)
        self.free = torch.cat([self.free, slots.to(torch.int32)])

    def choose_evictions(self, count: int, due: int | None = None) -> tuple[Tensor, bool]:
        """Chooses about `count` memory slots to evict. Returns the slots, and whether more slots could be evicted.

        Args:
            due: if given, the step that needs the slots. Slots that an earlier step will use, or that the current or
                the previous step has used, are then not chosen.
        """
        # Rows that were read ahead for an earlier step may have pending gradients, so count them as used by the current
        # call.
        self._marks.masked_fill_((self._marks > _SOON - self.step) & (self._marks <= _SOON), self._call)
        marks, slots = self._marks.topk(max(count, len(self._marks) // _SHARE), largest=False)
        if due is None:
            may_go = marks <= _SOON
        else:
            may_go = (marks < _SOON - due) & ((marks <= self._before) | (marks > _KNOWN))
        return slots[may_go], bool(may_go.all())
