"""The memory behind a part of a table, or of what an optimizer keeps of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Held:
    """Memory of one rank's part of a tensor. Aliases of the tensor share it.

    Args:
        local: this rank's part.
        keeps: whatever is to live as long.
    """

    def __init__(self, local: Tensor, keeps: object = None) -> None:
        self.shape, self.dtype, self.device = local.shape, local.dtype, local.device
        self._local: Tensor | None = local
        self.on_use: Callable[[], None] | None = None
        """Called before anyone reads or writes it, while an update of it is still to come."""
        self._keeps = keeps

    def dense(self) -> Tensor:
        """This rank's part, to be read."""
        if self.on_use is not None:
            self.on_use()
        return self.now()

    def now(self) -> Tensor:
        """This rank's part as it is, for who knows what is to come."""
        assert self._local is not None
        return self._local

    def memory(self) -> Tensor:
        """This rank's part, to be written or viewed: what is written is kept."""
        if self.on_use is not None:
            self.on_use()
        assert self._local is not None
        return self._local

    is_elsewhere = False
    """Whether most of it is not in memory."""

    def by_ids(self) -> Tensor:
        """This rank's part, for a program that reads its rows by ids alone."""
        return self.memory()

    def replace(self, local: Tensor) -> None:
        """Puts other memory in the place of what there is."""
        self.shape, self.dtype, self.device = local.shape, local.dtype, local.device
        self._local = local

    def note_write(self) -> None:
        """Counts a write by an op of the part: below autograd, memory does not count by itself."""
        if self._local is not None:
            torch.autograd.graph.increment_version(self._local)

    def copied(self) -> Held:
        """Copies the memory."""
        return Held(self.dense().clone())

    @property
    def unreduced(self) -> bool:
        """Whether it is of a gradient that DDP would still have each rank's own of."""
        of = getattr(self._keeps, "of", None)
        gradient = of() if of is not None else None
        return gradient is not None and gradient.unreduced

    def viewer(self) -> object:
        """Returns the object that views of this memory keep alive."""
        return self._keeps

    def pinned(self) -> Tensor:
        """Returns its memory to a caller who keeps it for good."""
        return self.memory()
