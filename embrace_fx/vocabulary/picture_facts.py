"""Facts shown with a schedule's picture: table placements, DDP's estimated step, other numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TablePlace:
    """The distribution of a table over ranks, and its share of memory and of sent bytes.

    Attributes:
        parts: each rank's part, in words; a single entry if all ranks have the same.
        table_bytes: bytes of the whole table.
        memory_share: its share of all parameters' bytes, from 0 to 1.
        sent_share: its share of the bytes that a rank sends in a step, from 0 to 1.
    """

    name: str
    shape: tuple[int, ...]
    strategy: str
    parts: tuple[str, ...]
    table_bytes: int
    memory_share: float
    sent_share: float


@dataclass(frozen=True)
class StepEstimate:
    """The estimated step on a number of ranks, with the same plan and a batch of the same size on each rank."""

    ranks: int
    step_ms: float
    ddp_exposed_ms: float


@dataclass(frozen=True)
class PictureFacts:
    """Facts shown with one schedule.

    Attributes:
        ddp_exposed_ms: estimated time that DDP's AllReduces add to the same compute. Those of tables come after the
            backward, because their gradients come last. The backward hides the others as far as it lasts.
        steps: steps estimated by the cost model, in ascending number of ranks, including the plan's own number.
    """

    ddp_exposed_ms: float
    steps: tuple[StepEstimate, ...]
    tables: tuple[TablePlace, ...]
