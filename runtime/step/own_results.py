"""Results that are views, made tensors that the user may write in place: `logits = model(x); logits += bias`.

Autograd refuses to write a view that a custom function returns, since the function's gradient would no longer be that
of what the view shows. Here no result with a gradient shares memory with another one, nor with an input (capture copies
those that would): nobody sees that it is no view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from embrace_fx.runtime.tables.table_part import local_part


def own_results(results: Sequence[Any], differentiable: Iterable[int]) -> tuple[list[Any], list[int]]:
    """The results of a call, with plain tensors, which count their own writes, in the place of views.

    Args:
        results: of a program's call.
        differentiable: places among them of those with a gradient; others may be written as they are.

    Returns:
        The results, and the places of those that were views.
    """
    given = list(results)
    made = [k for k in differentiable if type(given[k]) is Tensor and given[k]._is_view()]
    for k in made:
        view = given[k]
        plain = view.new_empty(0)
        given[k] = plain.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
    return given, made


def in_memory_of(made: Iterable[Tensor], read: Iterable[tuple[Tensor, int]]) -> list[tuple[Tensor, int]]:
    """Finds tensors that share memory with those that the backward reads, and returns their versions.

    Args:
        made: plain tensors that `own_results` made.
        read: what the backward reads, and its versions.
    """
    memory = {memory_of(tensor) for tensor, _ in read}
    shared = (tensor.detach() for tensor in made if memory_of(tensor) in memory)
    return [(tensor, tensor._version) for tensor in shared]


def memory_of(tensor: Tensor) -> int:
    """Returns a number that tensors in the same memory share."""
    return int(local_part(tensor).untyped_storage()._cdata)
