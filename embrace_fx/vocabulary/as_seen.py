"""Detects tensors that were written since they were recorded, by torch's version counter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AsSeen:
    """Tensors, and how often each had been written when it was recorded."""

    tensors: tuple[Tensor, ...] = ()
    writes: tuple[int, ...] = ()

    @staticmethod
    def of(values: Iterable[object]) -> AsSeen:
        """Records the tensors among some values, without those made in inference mode, whose writes are not counted."""
        return AsSeen.of_all([each for each in values if isinstance(each, Tensor) and not each.is_inference()])

    @staticmethod
    def of_all(tensors: Iterable[Tensor]) -> AsSeen:
        """Records tensors.

        Raises:
            RuntimeError: one was made in inference mode.
        """
        found = tuple(tensors)
        return AsSeen(found, _writes(found))

    def written(self) -> list[Tensor]:
        """Lists the tensors that have been written since."""
        now = _writes(self.tensors)
        return [each for each, one, other in zip(self.tensors, self.writes, now, strict=True) if one != other]

    def is_of(self, values: Iterable[object]) -> bool:
        """Returns whether the values have the same tensors, unwritten since."""
        now = AsSeen.of(values)
        return [id(each) for each in now.tensors] == [id(each) for each in self.tensors] and not self.written()

    def __add__(self, other: AsSeen) -> AsSeen:
        return AsSeen(self.tensors + other.tensors, self.writes + other.writes)


def _writes(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    return tuple([each._version for each in tensors])
