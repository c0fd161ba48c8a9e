"""Results that are views, made tensors that the user may write in place: `logits = model(x); logits += bias`.

Autograd refuses to write a view that a custom function returns, since the function's gradient would no longer be that
of what the view shows. Here no result with a gradient shares memory with another one, nor with an input (capture copies
those that would): nobody sees that it is no view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


class OwnResults:
    """The results of a program's calls, with plain tensors in the place of views.

    Args:
        differentiable: places, among the results of a call, of those with a gradient; others may be written.
    """

    def __init__(self, differentiable: Sequence[int]) -> None:
        self._places = tuple(differentiable)
        self._made: tuple[int, ...] = ()

    def of(self, results: Sequence[Any]) -> list[Any]:
        """The results of a call; plain tensors in the memory of views count their own writes, see `read_again`."""
        given = list(results)
        self._made = tuple(k for k in self._places if type(given[k]) is Tensor and given[k]._is_view())
        for k in self._made:
            view = given[k]
            plain = view.new_empty(0)
            given[k] = plain.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        return given

    def read_again(self, results: Sequence[Any], read: Iterable[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
        """Those results of the last call that share memory with what the backward reads, and their versions.

        Args:
            results: of `of`.
            read: what the backward reads, and its versions.
        """
        if not self._made:
            return []
        memory = {memory_of(tensor) for tensor, _ in read}
        shared = (results[k].detach() for k in self._made if memory_of(results[k]) in memory)
        return [(result, result._version) for result in shared]


def memory_of(tensor: Tensor) -> int:
    """What two tensors have in common that show the same memory."""
    return int(tensor.untyped_storage()._cdata)
