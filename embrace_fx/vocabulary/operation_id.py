"""The typed identity of an operation, which graphs, schedules, launchers and recordings of all ranks share."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

Lane = Literal["compute", "ids", "embedding", "dense", "delayed", "offload", "reload", "storage"]
CLASS_LANES: tuple[Lane, ...] = ("ids", "embedding", "dense", "delayed")
"""The communication classes, which share the wire."""
URGENT: tuple[Lane, ...] = ("ids", "embedding")
"""The classes that the next forward waits for first: their streams have a high priority."""
COPIES: tuple[Lane, ...] = ("offload", "reload", "storage")
"""Lanes of copies out of memory and back: one each way for saved values, one for rows of tables beyond memory."""
LANES: tuple[Lane, ...] = ("compute", *CLASS_LANES, *COPIES)
"""Where an operation runs: on the rank's processor, on the wire, or between memory and storage."""

Kind = Literal[
    "backward",  # compute of a block's gradients
    "forward",  # compute of a block
    "update",  # a bucket's parameters, or a table's rows, are updated
    "rows",  # rows of the shard are looked up, or received rows joined
    "own",  # the training loop's own code
    "loader",  # the next batch is read
    "ids",  # the next batch's ids, AllGather
    "gradients",  # a table's row gradients, AlltoAll: all of them, or the prior ones
    "lookups",  # looked-up rows, AlltoAll: all of them, late ones or early ones
    "all_reduce",  # a chunk of a bucket
    "positions",  # scored positions of an output layer over a sharded table, or what was computed of them
    "delayed",  # a piece of a table's delayed row gradients, AlltoAll
    "offload",  # a saved value is copied out of memory
    "reload",  # a saved value is copied back
    "read",  # rows of a table beyond memory are read
    "write",  # rows of a table beyond memory are written behind
]

HeadPart = Literal["counts", "labels", "hidden states", "statistics", "coefficients", "hidden gradients"]
"""What ranks exchange of the scored positions of an output layer."""

Part = Literal["whole", "early", "late", "prior", "delayed", "chunk"] | HeadPart
"""The part an operation is for: early or late rows, prior gradients or a piece of the delayed ones, a chunk."""

_SPELLED: dict[Kind, dict[Part, str]] = {
    "lookups": {"whole": "{what} rows", "late": "{what} rows", "early": "{what} early rows"},
    "gradients": {"whole": "{what} gradients", "prior": "{what} prior"},
    "delayed": {"delayed": "{what} delayed [{number}]"},
    "all_reduce": {"chunk": "{what} [{number}]"},
    "positions": {
        "counts": "{what} counts",
        "labels": "{what} labels",
        "hidden states": "{what} hidden states [{number}]",
        "statistics": "{what} statistics [{number}]",
        "coefficients": "{what} coefficients",
        "hidden gradients": "{what} hidden gradients [{number}]",
    },
    "update": {"whole": "update {what}"},
    "rows": {"whole": "rows {what}"},
    "offload": {"whole": "offload {what}"},
    "reload": {"whole": "reload {what}"},
    "read": {"whole": "read {what}"},
    "write": {"whole": "write {what}"},
    "backward": {"whole": "backward {what}"},
    "forward": {"whole": "forward {what}"},
}
"""The text of operations; others are shown by `what` alone."""


class OperationId(NamedTuple):
    """The identity of an operation in graphs, schedules, launchers and recordings; equal on all ranks.

    It is a tuple because hashing one calls no Python code: launchers and recorders look ids up a hundred times a step.

    Attributes:
        kind: what it does.
        what: the table, row space or bucket it is for.
        part: the part of `what`.
        number: the number of a chunk or a piece, from 0.
        lane: where it runs.
    """

    kind: Kind
    what: str
    part: Part = "whole"
    number: int = 0
    lane: Lane = "compute"

    def __str__(self) -> str:
        """Returns the id as text, for display and as a key; the text is never parsed."""
        return _SPELLED.get(self.kind, {}).get(self.part, "{what}").format(what=self.what, number=self.number)

    @property
    def needs_lookahead(self) -> bool:
        """Whether the operation exists only where the next batch is known: ids, early rows, delayed gradients."""
        return self.part in ("early", "delayed") or self.kind == "ids"


IDS = OperationId("ids", "ids", lane="ids")
"""The AllGather of the next batch's ids, of all tables."""

ROW_NORMS = OperationId("all_reduce", "row norms", lane="dense")
"""The AllReduce, between two steps, of the squares of rows of all tables that row-wise optimizers step."""


@cache
def bucket_name(bucket: int) -> str:
    """Returns the `what` of a bucket's operations: "bucket 0"."""
    return f"bucket {bucket}"


@cache
def chunk_id(bucket: int, number: int) -> OperationId:
    """Makes the id of the AllReduce of a bucket's chunk."""
    return OperationId("all_reduce", bucket_name(bucket), "chunk", number, "dense")


@cache
def rows_id(table: str, part: Part) -> OperationId:
    """Makes the id of the AlltoAll of a table's rows: "whole", "early" or "late"."""
    return OperationId("lookups", table, part, lane="embedding")


@cache
def gradients_id(table: str, part: Part, number: int = 0) -> OperationId:
    """Makes the id of the AlltoAll of a table's row gradients: "whole", "prior", or a piece of the "delayed" ones."""
    if part == "delayed":
        return OperationId("delayed", table, part, number, "delayed")
    return OperationId("gradients", table, part, number, "embedding")


@cache
def head_id(table: str, part: HeadPart, chunk: int = 0) -> OperationId:
    """Makes the id of an exchange of an output layer over a sharded table."""
    return OperationId("positions", table, part, chunk, "embedding")


def storage_id(kind: Literal["read", "write"], table: str) -> OperationId:
    """Makes the id of reading, or writing, rows of a table beyond memory."""
    return OperationId(kind, table, lane="storage")


@cache
def compute_id(kind: Kind, what: str) -> OperationId:
    """Makes the id of a compute operation for a table or a bucket."""
    return OperationId(kind, what)


EARLY = OperationId("rows", "early rows", "early")
END = OperationId("backward", "end of backward", "late")
BETWEEN = OperationId("update", "optimizer step, next batch", "late")
START = OperationId("forward", "start of forward", "early")
"""Compute operations for no particular table or bucket: the begin and end of a backward, the begin of a forward, and
the time between the two."""

OPTIMIZER = OperationId("update", "optimizer step", "late")
OWN_CODE = OperationId("own", "your code", "late")
LOADER = OperationId("loader", "loader", "late")
"""The training loop's own operations between a backward and the next call: known once measured."""
BESIDE = (OWN_CODE, OPTIMIZER, LOADER)

WHOLE_BACKWARD = OperationId("backward", "backward", "late")
WHOLE_FORWARD = OperationId("forward", "forward", "late")
"""The phases of a single process, which no communication cuts."""
