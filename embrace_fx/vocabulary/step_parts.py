"""The categories of a step's time in reports, pictures and metrics: what the training thread spends it on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal, get_args

from embrace_fx.vocabulary.operation_id import BETWEEN, EARLY, Kind, OperationId

Share = Literal[
    "loader",  # reading the next batch from the data loader
    "forward",  # compute of the forward, including lookups
    "backward",  # compute of the backward
    "optimizer",  # the optimizer's own step, and updates of tables and buckets
    "your code",  # the training loop's own code, between the model's call, the backward and the optimizer's step
    "ids",  # waits for the ids of other ranks, and for slower ranks
    "embedding",  # waits for rows of tables or their gradients, or for an output layer over a sharded table
    "dense",  # waits for the reduced gradients of all other parameters
    "delayed",  # waits for gradients of rows that the next batch does not read
    "offload",  # waits for a saved value to be copied out
    "reload",  # waits for a saved value to be copied back
    "storage",  # waits for rows of tables larger than memory
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
def time_category(operation: OperationId) -> Share:
    """Returns the category under which the time of an operation is reported. For compute, this is the time that the
    operation runs. For collectives and copies, it is the time that compute waits for them.
    """
    if operation.lane != "compute":
        return operation.lane
    # `BETWEEN` excludes the optimizer and the loader, which have their own operations. The rest is work before the
    # forward.
    if operation == BETWEEN:
        return "forward"
    # `EARLY` also applies delayed updates, which take far longer than looking up early rows.
    return "optimizer" if operation == EARLY else _OF_KIND[operation.kind]
