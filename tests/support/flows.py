"""A flow on one process, whose table only listens: what a flow decides, without anything being sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from embrace_fx.runtime.flow.flow import Flow
from embrace_fx.runtime.flow.next_batch import IdsProgram
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.ranks.announcement import Announcements
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.graph import Values
from embrace_fx.vocabulary.operation_id import IDS, OperationId, gradients_id, rows_id

ROWS = 10
"""Of the table, whose name is "t"."""
EARLY, LATE = rows_id("t", "early"), rows_id("t", "late")
PRIOR, DELAYED = gradients_id("t", "prior"), gradients_id("t", "delayed")


class Listening:
    """In place of a table's exchange: tells what it is asked to do, and answers as the test says.

    Attributes:
        told: what it has been asked to do.
        heard: likewise, of what is of one launch, with that.
    """

    def __init__(self) -> None:
        self.told: list[str] = []
        self.heard: list[tuple[str, OperationId]] = []
        self.waiting = False
        self.usable = self.holds = self.splits = True
        self.gradient, self.table, self.name = self, self, "t"
        self.members = (self,)

    def still_equal(self) -> bool:
        self.told.append("still_equal")
        return self.holds

    def can_split(self, ids: Tensor | None) -> bool:
        return self.splits and ids is not None

    def cut(self, ids: Tensor, counts: Tensor, found: object) -> None:
        self.told.append(f"cut for {ids.tolist()}")

    def __getattr__(self, name: str) -> Any:
        def told(*args: object) -> Any:
            self.told.append(name)
            self.heard += [(name, launch) for launch in args[:1] if isinstance(launch, OperationId)]

        return told


class Buckets:
    """In place of buckets: there are none."""

    all = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def ids_program() -> IdsProgram:
    """Of one table, whose lookups read the batch's only tensor."""

    def unique(leaves: Sequence[Any]) -> Values:
        return {"unique": leaves[0].unique()}

    def routing(values: Values, unpacked: list[Tensor]) -> None:
        values["ids"], values["counts"] = values["unique"], torch.tensor([values["unique"].numel()])

    return IdsProgram(
        unique=unique,
        unique_on_device=lambda leaves: (unique(leaves), []),
        rows_of_batch=lambda values: [values["unique"]],
        routing=routing,
        tables=("t",),
        num_rows=(ROWS,),
        routes={"t": ("ids", "counts")},
        spaces={},
        paddings={},
        is_pure=True,
        reads=(0,),
    )


def listening_flow(table: Listening, warn: Callable[[], None], order: Iterable[OperationId] = ()) -> Flow:
    """A flow of one table and no buckets. Its launcher is to be closed."""
    communicator = Communicator(None)
    launcher = Launcher(order or [EARLY, PRIOR, DELAYED, IDS, LATE], [IDS, LATE], LaunchQueue(Recorder()), communicator)
    return Flow(
        Announcements(communicator),
        launcher,
        {"t": cast(RowExchange, table)},
        cast(Any, Buckets()),
        looks_ahead=True,
        warn=warn,
        after_announcement=lambda: None,
    )
