"""Makes a model's results tensors that the user may write in place: `logits = model(x); logits += bias`.

Autograd refuses to write a view that a custom function returns, since the function's gradient would no longer be that
of what the view shows. Here no result with a gradient shares memory with another one, nor with an input (capture copies
those that would): nobody sees that it is no view.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.version_snapshot import VersionSnapshot


def writable_results(results: Sequence[Any], differentiable: Iterable[int]) -> tuple[list[Any], list[int]]:
    """Replaces results that are views by plain tensors with the same memory, so that writes by user code are detected
    by their version counters. Returns all results, and the indices of the replaced ones. Those without a gradient stay.
    """
    given = list(results)
    made = [k for k in differentiable if type(given[k]) is Tensor and given[k]._is_view()]
    for k in made:
        view = given[k]
        plain = view.new_empty(0)
        given[k] = plain.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
    return given, made


def sharing_memory(made: Iterable[Tensor], read: VersionSnapshot) -> VersionSnapshot:
    """Returns a snapshot of the tensors in `made` that share memory with those that the backward reads (`read`)."""
    memory = {storage_id(tensor) for tensor in read.tensors}
    shared = (tensor.detach() for tensor in made if storage_id(tensor) in memory)
    return VersionSnapshot.of_tensors_in(shared)


def storage_id(tensor: Tensor) -> int:
    """Returns an integer that is equal for tensors with the same storage."""
    return int((tensor.held.stored() if isinstance(tensor, TableShard) else tensor).untyped_storage()._cdata)
