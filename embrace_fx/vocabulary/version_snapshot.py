"""Detects writes to tensors by torch's version counter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

_VERSION = attrgetter("_version")


@dataclass(frozen=True)
class VersionSnapshot:
    """Tensors with their version counters at some time, to detect later writes.

    Attributes:
        tensors: the tensors.
        writes: the version counter of each tensor at that time.
    """

    tensors: tuple[Tensor, ...] = ()
    writes: tuple[int, ...] = ()

    @staticmethod
    def of_tensors_in(values: Iterable[object]) -> VersionSnapshot:
        """Takes a snapshot of the tensors among `values`, except inference tensors, which have no version counter."""
        found = tuple([each for each in values if isinstance(each, Tensor) and not each.is_inference()])
        return VersionSnapshot(found, tuple(map(_VERSION, found)))

    @staticmethod
    def of_tensors(tensors: Iterable[Tensor]) -> VersionSnapshot:
        """Takes a snapshot of tensors.

        Raises:
            RuntimeError: a tensor was created in inference mode.
        """
        found = tuple(tensors)
        return VersionSnapshot(found, tuple(map(_VERSION, found)))

    def written(self) -> list[Tensor]:
        """Returns the tensors that were written since the snapshot."""
        now = tuple(map(_VERSION, self.tensors))
        if now == self.writes:
            return []
        return [each for each, one, other in zip(self.tensors, self.writes, now, strict=True) if one != other]

    def is_current_for(self, values: Iterable[object]) -> bool:
        """Returns whether the tensors among `values` are the tensors of the snapshot, in the same order, and none has
        been written since. Inference tensors are ignored.
        """
        now = [each for each in values if isinstance(each, Tensor) and not each.is_inference()]
        return [*map(id, now)] == [*map(id, self.tensors)] and tuple(map(_VERSION, self.tensors)) == self.writes

    def __add__(self, other: VersionSnapshot) -> VersionSnapshot:
        return VersionSnapshot(self.tensors + other.tensors, self.writes + other.writes)
