"""Variants of a step, by what the step before knew of its batch and by whether the next batch is known.

Each variant of a forward or backward has its own graph. Variants differ only in what is submitted, awaited and updated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from embrace_fx.vocabulary.operation_id import OperationId

Arrival = Literal["cut", "whole", "other"]
ARRIVALS: tuple[Arrival, ...] = get_args(Arrival)


@dataclass(frozen=True)
class ForwardVariant:
    """A variant of the forward.

    Attributes:
        arrives: "cut": the backward before has cut its gradients, and sent early rows, for this batch; "whole": it has
            cut nothing, or there was none; "other": it has cut for another batch than the one that came.
        coming: the next batch is known on all ranks, and its ids are sent.
    """

    arrives: Arrival = "cut"
    coming: bool = True
    phase: ClassVar[str] = "forward"

    @property
    def is_steady(self) -> bool:
        return self == ForwardVariant()

    def __str__(self) -> str:
        """Returns the name of its graph; in the steady step under lookahead it is "forward"."""
        arrival = {"cut": "", "whole": ", rows whole", "other": ", another batch"}[self.arrives]
        return f"forward{arrival}{'' if self.coming else ', none coming'}"


@dataclass(frozen=True)
class BackwardVariant:
    """A variant of the backward.

    Attributes:
        left: delayed gradients of the backward before are still to be applied.
        coming: the ids of the next batch are in flight.
        cut: gradients are cut into prior and delayed ones, and early rows of the next batch are sent.
    """

    left: bool = True
    coming: bool = True
    cut: bool = True
    phase: ClassVar[str] = "backward"

    @property
    def is_steady(self) -> bool:
        return self == BackwardVariant()

    def __str__(self) -> str:
        """Returns the name of its graph; in the steady step under lookahead it is "backward"."""
        left = "" if self.left else ", nothing left"
        coming = "" if self.coming else ", none coming"
        return f"backward{left}{coming}{'' if self.cut or not self.coming else ', whole'}"


StepVariant = ForwardVariant | BackwardVariant


@dataclass(frozen=True)
class Varied:
    """The phase of a graph that belongs to another variant than the steady one.

    Attributes:
        variant: the variant of that phase.
        steady: all launches that a steady step submits, in both phases.
        into_forward: chunks of buckets are awaited in the forward, not in the backward.
    """

    variant: StepVariant
    steady: frozenset[OperationId]
    into_forward: bool


_FORWARDS = [ForwardVariant(arrives, coming) for arrives in ARRIVALS for coming in (True, False)]
_NEXT = ((True, True), (True, False), (False, False))
_BACKWARDS = [BackwardVariant(left, coming, cut) for left in (True, False) for coming, cut in _NEXT]

VARIANTS: tuple[StepVariant, ...] = (*_FORWARDS, *_BACKWARDS)
"""All variants. Gradients are cut by the ids of the next batch; where it is not known, they are whole."""
