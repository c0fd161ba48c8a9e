"""Variants of a step by its relation to the step before and the one after: each is a graph of its own.

A batch arrives as what the step before could know of it, and the batch after it is known or not. So a forward and a
backward come in a few variants, which differ in what is submitted, awaited and updated, and in nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embrace_fx.vocabulary.operation_id import OperationId

Arrival = Literal["cut", "whole", "other"]
ARRIVALS: tuple[Arrival, ...] = ("cut", "whole", "other")


@dataclass(frozen=True)
class ForwardVariant:
    """A forward.

    Attributes:
        arrives: "cut": the backward before has cut its gradients and sent early rows, for this batch; "whole": it has
            cut nothing, or there was none; "other": it has, but for another batch than the one that came.
        coming: the next batch is known on all ranks, and its ids travel.
    """

    arrives: Arrival = "cut"
    coming: bool = True

    @property
    def phase(self) -> str:
        return "forward"

    @property
    def is_steady(self) -> bool:
        return self == ForwardVariant()

    def __str__(self) -> str:
        """The name of its graph; that of the steady step under lookahead is just "forward"."""
        arrival = {"cut": "", "whole": ", rows whole", "other": ", another batch"}[self.arrives]
        return f"forward{arrival}{'' if self.coming else ', none coming'}"


@dataclass(frozen=True)
class BackwardVariant:
    """A backward.

    Attributes:
        left: delayed gradients of the backward before are still to be applied.
        coming: the ids of the next batch are under way.
        cut: gradients are cut into prior and delayed ones, and early rows of the next batch leave.
    """

    left: bool = True
    coming: bool = True
    cut: bool = True

    @property
    def phase(self) -> str:
        return "backward"

    @property
    def is_steady(self) -> bool:
        return self == BackwardVariant()

    def __str__(self) -> str:
        """The name of its graph; that of the steady step under lookahead is just "backward"."""
        left = "" if self.left else ", nothing left"
        coming = "" if self.coming else ", none coming"
        return f"backward{left}{coming}{'' if self.cut or not self.coming else ', whole'}"


StepVariant = ForwardVariant | BackwardVariant


@dataclass(frozen=True)
class Varied:
    """The phase of a graph that belongs to another variant than the steady one.

    Attributes:
        variant: of it.
        steady: what a steady step submits, in both phases.
        into_forward: chunks of buckets are awaited in the forward, and not in the backward.
    """

    variant: StepVariant
    steady: frozenset[OperationId]
    into_forward: bool


_FORWARDS = [ForwardVariant(arrives, coming) for arrives in ARRIVALS for coming in (True, False)]
_NEXT = ((True, True), (True, False), (False, False))
_BACKWARDS = [BackwardVariant(left, coming, cut) for left in (True, False) for coming, cut in _NEXT]

VARIANTS: tuple[StepVariant, ...] = (*_FORWARDS, *_BACKWARDS)
"""All there are. Gradients are cut by the ids of the next batch: where none is known, they are whole."""
