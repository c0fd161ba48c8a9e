"""Facts shown with a schedule's picture: where tables are, DDP's estimated step, steps on other numbers of ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TablePlace:
    """How a table is distributed over ranks, and its shares of memory and communication.

    Attributes:
        name: the table's name.
        shape: the shape of the whole table.
        strategy: the table's strategy in the plan.
        parts: what each rank has, in words; a single entry if all ranks have the same.
        table_bytes: bytes of the whole table.
        memory_share: the table's share of the bytes of all parameters, from 0 to 1.
        sent_share: the table's share of the bytes that a rank sends per step, from 0 to 1.
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
    """The estimated time of a step on some number of ranks, with the same plan and the same batch size per rank.

    Attributes:
        ranks: the number of ranks.
        step_ms: the time of a step.
        ddp_exposed_ms: the time per step that DDP would wait for AllReduces that its backward cannot hide.
    """

    ranks: int
    step_ms: float
    ddp_exposed_ms: float


@dataclass(frozen=True)
class PictureFacts:
    """Facts shown beside the picture of one schedule.

    Attributes:
        ddp_exposed_ms: estimated time that DDP would wait for AllReduces that its backward cannot hide. The gradients
            of tables come last, so no compute hides their AllReduces.
        steps: estimated step times on increasing numbers of ranks, including the plan's own.
        tables: how each table is distributed over ranks.
    """

    ddp_exposed_ms: float
    steps: tuple[StepEstimate, ...]
    tables: tuple[TablePlace, ...]
