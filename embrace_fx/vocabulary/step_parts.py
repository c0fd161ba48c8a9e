"""The parts of a step in reports, pictures and metrics: the calling thread's time by purpose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal, get_args

from embrace_fx.vocabulary.operation_id import BETWEEN, EARLY, Kind, OperationId

Share = Literal[
    "loader",  # the next batch is read
    "forward",  # compute of the forward, including lookups
    "backward",  # compute of the backward
    "optimizer",  # the optimizer's own step, and updates of tables and buckets
    "your code",  # the training loop, between calls, backward and step
    "ids",  # waits for ids, and for slower ranks
    "embedding",  # waits for rows of tables or their gradients, or for an output layer over a sharded table
    "dense",  # waits for reduced gradients of everything else
    "delayed",  # waits for gradients of rows that the next batch does not read
    "offload",  # waits for a saved value to be copied out
    "reload",  # waits for a saved value to be copied back
    "storage",  # waits for rows of tables beyond memory
    "between",  # time in which no operation of the schedule runs
]
SHARES: tuple[Share, ...] = get_args(Share)

_OF_KIND: Mapping[Kind, Share] = {
    "backward": "backward",
    "forward": "forward",
    "update": "optimizer",
    "rows": "forward",
    "own": "your code",
    "loader": "loader",
}


@cache
def share_of(operation: OperationId) -> Share:
    """Returns the part of a step that reports an operation's time: for compute its own time, for communication the time
    spent waiting for it.
    """
    if operation.lane != "compute":
        return operation.lane
    # Optimizer and loader are measured separately, so this is the call's work before its forward.
    if operation == BETWEEN:
        return "forward"
    # This operation also applies delayed updates, which take far longer than the lookup of early rows.
    return "optimizer" if operation == EARLY else _OF_KIND[operation.kind]
