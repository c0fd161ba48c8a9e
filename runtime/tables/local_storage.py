"""The memory behind a part of a table, of what an optimizer keeps of it, and of gradients on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from embrace_fx.vocabulary.modes import outside_of_modes


class LocalStorage:
    """Memory of one rank's part of a tensor. Aliases of the tensor share it.

    Args:
        local: this rank's part.
        keeps: whatever is to live as long.
    """

    def __init__(self, local: Tensor, keeps: object = None) -> None:
        self.shape, self.dtype, self.device = local.shape, local.dtype, local.device
        self.local: Tensor | None = local
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
        assert self.local is not None
        return self.local

    def memory(self) -> Tensor:
        """This rank's part, to be written or viewed: what is written is kept."""
        return self.dense()

    is_elsewhere = False
    """Whether most of it is not in memory."""

    def by_ids(self) -> Tensor:
        """This rank's part, for a program that reads its rows by ids alone."""
        return self.memory()

    def replace(self, local: Tensor) -> None:
        """Puts other memory in the place of what there is."""
        self.shape, self.dtype, self.device = local.shape, local.dtype, local.device
        self.local = local

    def note_write(self) -> None:
        """Counts a write by an op of the part: below autograd, memory does not count by itself."""
        if self.local is not None:
            torch.autograd.graph.increment_version(self.local)

    def check_write(self) -> None:
        """Raises `RuntimeError` where a write would be lost."""

    def viewed(self, own: Tensor) -> LocalStorage:
        """Holds a view of its memory."""
        return LocalStorage(own, self.viewer())

    of_gradient = False
    """Whether it is a gradient's, whose rows may be told apart."""

    @property
    def is_dense(self) -> bool:
        """Whether it has memory for all elements."""
        return True

    def values(self) -> Tensor:
        """Elements of which all others are zero: all."""
        return self.dense()

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Changes each element by itself."""
        own = self.memory()
        own.copy_(change(own))

    def copied(self) -> LocalStorage:
        """Copies the memory."""
        return LocalStorage(self.dense().clone())

    def __deepcopy__(self, memo: dict[int, object]) -> LocalStorage:
        """Copies the memory to the host: what `torch.distributed.checkpoint` keeps while it saves."""
        return LocalStorage(self.dense().to("cpu", copy=True))

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


class CopyStorage(LocalStorage):
    """Memory of a copy, into which nobody may write: it would be lost.

    Args:
        refusal: the error of a write.
    """

    def __init__(self, local: Tensor, refusal: str) -> None:
        super().__init__(local)
        self._refusal = refusal

    def check_write(self) -> None:
        raise RuntimeError(self._refusal)

    def viewed(self, own: Tensor) -> LocalStorage:
        return CopyStorage(own, self._refusal)


Rows = tuple[Tensor, Tensor]
"""ids (K,), rows (K, d)."""
Landed = TypeVar("Landed", Tensor, Sequence[Rows])

GONE = (
    "the compiled model was deleted while this gradient of its last backward was on its way. Keep the model, or read "
    "the gradient before."
)


class GradientFuture(Generic[Landed]):
    """Gradients on their way, of a table, a row space or a bucket, as what stands in for them in `.grad` knows them.

    Args:
        wait: waits for them. It refers to the model weakly: autograd's owner of `.grad` is nothing that the garbage
            collector sees, so that a gradient that kept its model, and with it its own parameter, would keep it for
            ever.

    Attributes:
        landed: the gradients, of one parameter after the other; None: nobody has waited for them.
    """

    def __init__(self, wait: Callable[[], Sequence[Landed]]) -> None:
        self._wait: Callable[[], Sequence[Landed]] = wait
        self.landed: Sequence[Landed] | None = None

    def now(self) -> Sequence[Landed]:
        """Returns the gradients, once they are here.

        Raises:
            RuntimeError: the model is gone, and with it what would have brought them.
        """
        if self.landed is None:
            with outside_of_modes():
                self.landed = self._wait()
        return self.landed
