"""Stores this rank's shard of a table or of its optimizer state, and represents gradients that are still in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from embrace_fx.vocabulary.modes import outside_of_modes


class LocalStorage:
    """Stores this rank's shard of a tensor. All aliases of the tensor share it, and keep the object `keeps` alive.

    Args:
        no_writes: for a copy, the message of the error that a write raises.
    """

    def __init__(self, local: Tensor, keeps: object = None, no_writes: str = "") -> None:
        self.shape, self.dtype, self.device = local.shape, local.dtype, local.device
        self.local: Tensor | None = local
        self.on_use: Callable[[], None] | None = None
        """Called before each read or write while an update is pending."""
        self._keeps, self._no_writes = keeps, no_writes

    def dense(self) -> Tensor:
        """Applies pending updates, and returns this rank's shard for reading."""
        if self.on_use is not None:
            self.on_use()
        return self.stored()

    def stored(self) -> Tensor:
        """Returns this rank's shard as it is, without applying pending updates."""
        assert self.local is not None
        return self.local

    def memory(self) -> Tensor:
        """Applies pending updates, and returns this rank's shard for writes and views."""
        return self.dense()

    is_elsewhere = False
    """Whether most rows are outside of memory."""

    def by_ids(self) -> Tensor:
        """Returns this rank's shard, for a graph that looks up rows by id and applies their deferred steps itself."""
        return self.memory()

    def replace(self, local: Tensor) -> None:
        """Replaces this rank's shard by another tensor of the same shape."""
        self.shape, self.dtype, self.device = local.shape, local.dtype, local.device
        self.local = local

    def record_write(self) -> None:
        """Increments the shard's version counter after a write, because ops below autograd do not."""
        if self.local is not None:
            torch.autograd.graph.increment_version(self.local)

    def check_write(self) -> None:
        """Raises `RuntimeError` if writes to this storage, a copy, would be lost."""
        if self._no_writes:
            raise RuntimeError(self._no_writes)

    def storage_of_view(self, view: Tensor) -> LocalStorage:
        """Returns a storage for `view`, a view of this storage's memory."""
        return LocalStorage(view, self.viewer(), self._no_writes)

    of_gradient = False
    """Whether this stores a gradient, which may be kept as single rows."""

    @property
    def is_dense(self) -> bool:
        """Whether all elements are in memory."""
        return True

    def values(self) -> Tensor:
        """Returns the stored elements. All others, which only a subclass leaves out, are zero."""
        return self.dense()

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies an element-wise function to the stored elements, in place."""
        own = self.memory()
        own.copy_(change(own))

    def copied(self) -> LocalStorage:
        """Returns a copy with its own memory."""
        return LocalStorage(self.dense().clone())

    def __deepcopy__(self, memo: dict[int, object]) -> LocalStorage:
        """Copies the memory to the host, as `torch.distributed.checkpoint` does before an asynchronous save."""
        return LocalStorage(self.dense().to("cpu", copy=True))

    @property
    def unreduced(self) -> bool:
        """Whether this is a view of a gradient that is not yet reduced over ranks, as under `no_sync`."""
        of = getattr(self._keeps, "of", None)
        gradient = of() if of is not None else None
        return gradient is not None and gradient.unreduced

    def viewer(self) -> object:
        """Returns an object that views of this memory must keep alive, or None."""
        return self._keeps

    def pinned(self) -> Tensor:
        """Returns this rank's shard as a tensor that the caller may keep and write."""
        return self.memory()


Rows = tuple[Tensor, Tensor]
"""Row ids (K,) and rows (K, d)."""
Landed = TypeVar("Landed", Tensor, Sequence[Rows])

GONE = (
    "The compiled model was deleted while this gradient was still being sent. Keep a reference to the model, or read "
    "the gradient before you delete the model."
)


class GradientFuture(Generic[Landed]):
    """A future that delivers the gradients of several parameters, whose `.grad` refers to it.

    Args:
        wait: function that waits for the gradients. It must hold the model weakly: the garbage collector does not
            follow autograd's reference to `.grad`, so a gradient that held its model would leak it.

    Attributes:
        landed: the gradients, one per parameter, or None before the first wait.
    """

    def __init__(self, wait: Callable[[], Sequence[Landed]]) -> None:
        self._wait: Callable[[], Sequence[Landed]] = wait
        self.landed: Sequence[Landed] | None = None

    def now(self) -> Sequence[Landed]:
        """Waits for the gradients, and returns them. Raises `RuntimeError` if the model has been deleted."""
        if self.landed is None:
            with outside_of_modes():
                self.landed = self._wait()
        return self.landed
