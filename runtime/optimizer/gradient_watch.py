"""Whether what happens to dense gradients between backwards and steps happens to those of sharded tables too.

Dense gradients are in `.grad`, where anyone may change them; rows wait at their owners. What reaches the former alone
(clipping by torch's own function, an optimizer that `compile` was not given) would train half of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from embrace_fx.runtime.tables.row_table import RowTable


class Waits(Protocol):
    """A table's exchange."""

    @property
    def waiting(self) -> bool: ...


class GradientWatch:
    """Remembers gradients as they were delivered, and whether an optimizer of `compile`'s has been at them since.

    Args:
        tables: those whose rows wait, by name.
        parameters: all of the model's, as it holds them now.
    """

    def __init__(self, tables: Mapping[str, RowTable], parameters: Callable[[], Iterator[nn.Parameter]]) -> None:
        self._tables = tables
        self._parameters = parameters
        self._delivered: list[tuple[nn.Parameter, Tensor, int]] = []
        self._left = False  # dense ones have been delivered, and nobody who knows of the tables has taken them
        self._fault: str | None = None

    def note(self, parameters: Sequence[nn.Parameter]) -> None:
        """Remembers the gradients that were just delivered, as they are."""
        self._delivered = [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]

    def leave(self) -> None:
        """A backward has ended."""
        self._left = bool(self._tables) and self._any_dense()

    def take(self) -> None:
        """Dense gradients and rows are stepped together, or zeroed together."""
        self._left = False

    def _any_dense(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters())

    def check_written(self) -> None:
        """Raises where all dense gradients were written in place, or replaced, since they were delivered.

        That is what `torch.nn.utils.clip_grad_norm_` and `GradScaler.unscale_` do, and neither sees the gradients of
        sharded tables: the step would mix clipped and unclipped ones.
        """
        delivered, self._delivered = self._delivered, []
        left = [each for each in delivered if each[0].grad is not None]
        if self._tables and left and all(p.grad is not given or given._version != v for p, given, v in left):
            raise RuntimeError(
                "expected gradients as the backward left them, in optimizer.step(), found that all dense ones were "
                "changed in place (clipped or unscaled?) or replaced while the sharded tables' were not. Clip with the "
                "compiled model's own clip_grad_norm_(), scale the loss and not its gradients, and let "
                "GradScaler.step() do the unscaling."
            )

    def look(self, exchanges: Iterable[Waits]) -> str | None:
        """What is wrong, at the head of a forward or a backward: every dense gradient is gone, and the rows wait.

        Args:
            exchanges: where rows may be under way.
        """
        if self._left and self._fault is None and not self._any_dense():
            rows_wait = any(table.has_gradient for table in self._tables.values()) or any(e.waiting for e in exchanges)
            if rows_wait:
                self._fault = (
                    "expected the optimizer that compile() was given to step and to zero all gradients, found that "
                    "those of dense parameters were set to None while those of sharded tables "
                    f"({', '.join(self._tables)}) still wait: by another optimizer, which cannot see them, or by hand. "
                    "Pass every optimizer to compile(), and zero gradients by its zero_grad() or the compiled model's."
                )
        return self._fault
