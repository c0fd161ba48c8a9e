"""Variants of a step: whether the previous step knew this batch, and whether the next batch is known.

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
    """Describes what a forward communicates. This depends on what the previous backward has sent, and on whether the
    next batch is known.

    Early rows are rows that this batch reads and the previous batch does not. The previous backward can send them if it
    knows this batch.

    Attributes:
        arrives: "cut" if the previous backward has sent the early rows of this batch; "other" if it has sent those of
            another batch; "whole" if it has sent none, or there was no previous backward.
        coming: whether the next batch is known on all ranks, so that its ids are sent.
        phase: always "forward".
    """

    arrives: Arrival = "cut"
    coming: bool = True
    phase: ClassVar[str] = "forward"

    @property
    def is_steady(self) -> bool:
        """Whether the previous backward knew this forward's batch, and the next batch is known too."""
        return self.arrives == "cut" and self.coming

    def __str__(self) -> str:
        """Returns the name of its graph; "forward" for the steady step under lookahead."""
        arrival = {"cut": "", "whole": ", rows whole", "other": ", another batch"}[self.arrives]
        return f"forward{arrival}{'' if self.coming else ', none coming'}"


@dataclass(frozen=True)
class BackwardVariant:
    """Describes what a backward communicates. This depends on the previous backward, and on whether the next batch is
    known.

    Delayed gradients are those of rows that the next batch does not read. A backward sends them last, and the next
    backward applies them.

    Attributes:
        left: whether the previous backward has sent delayed gradients, which this backward applies.
        coming: whether the ids of the next batch are being exchanged.
        cut: whether this backward splits its gradients by the ids of the next batch. Then it sends delayed gradients
            separately, and already sends the rows that only the next batch reads.
        phase: always "backward".
    """

    left: bool = True
    coming: bool = True
    cut: bool = True
    phase: ClassVar[str] = "backward"

    @property
    def is_steady(self) -> bool:
        """Whether the previous backward knew this backward's batch, and this backward knows the next batch."""
        return self.left and self.coming and self.cut

    def __str__(self) -> str:
        """Returns the name of its graph; "backward" for the steady step under lookahead."""
        left = "" if self.left else ", nothing left"
        coming = "" if self.coming else ", none coming"
        return f"backward{left}{coming}{'' if self.cut or not self.coming else ', whole'}"


StepVariant = ForwardVariant | BackwardVariant


@dataclass(frozen=True)
class VariedPhase:
    """A phase (forward or backward) that differs from that of a steady step, in which the previous and the next batch
    are known.

    Attributes:
        variant: the variant of the step to which the phase belongs.
        steady: ids of all collectives that a steady step submits.
        into_forward: whether chunks of buckets are awaited in the next forward instead of the backward.
    """

    variant: StepVariant
    steady: frozenset[OperationId]
    into_forward: bool


_FORWARDS = [ForwardVariant(arrives, coming) for arrives in ARRIVALS for coming in (True, False)]
_NEXT = ((True, True), (True, False), (False, False))
_BACKWARDS = [BackwardVariant(left, coming, cut) for left in (True, False) for coming, cut in _NEXT]

VARIANTS: tuple[StepVariant, ...] = (*_FORWARDS, *_BACKWARDS)
"""All variants. Gradients are split by the ids of the next batch; they stay whole if it is not known."""
