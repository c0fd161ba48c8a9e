"""Ids of operations (collectives, copies, compute), shared by graphs, schedules, launchers and recordings."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

Lane = Literal["compute", "ids", "embedding", "dense", "delayed", "offload", "reload", "storage"]
CLASS_LANES: tuple[Lane, ...] = ("ids", "embedding", "dense", "delayed")
"""The communication classes, which share the network."""
URGENT: tuple[Lane, ...] = ("ids", "embedding")
"""The classes that the next forward waits for first. Their streams have a high priority."""
COPIES: tuple[Lane, ...] = ("offload", "reload", "storage")
"""Lanes of copies out of memory and back: two for saved values, one per direction, and one for rows of tables beyond
memory."""
LANES: tuple[Lane, ...] = ("compute", *CLASS_LANES, *COPIES)
"""Where an operation runs: on the rank's processor or device, on the network, or between memory and storage."""

Kind = Literal[
    "backward",  # backward compute of one block of the model
    "forward",  # forward compute of one block of the model
    "update",  # the update of a bucket's parameters or a table's rows
    "rows",  # looking up rows of the shard, or joining received rows
    "own",  # code of the user's training loop
    "loader",  # reading the next batch from the data loader
    "ids",  # AllGather of the next batch's ids
    "gradients",  # AlltoAll of a table's row gradients: all, or only those of rows that the next batch reads
    "lookups",  # AlltoAll of looked-up rows: all, only those that the previous batch also reads, or only the others
    "all_reduce",  # AllReduce of a chunk of a bucket
    "positions",  # exchange of labelled positions of a sharded output layer, or of values computed from them
    "delayed",  # AlltoAll of a piece of a table's delayed row gradients
    "offload",  # copying a saved value to the host or a file
    "reload",  # copying a saved value back into memory
    "read",  # reading rows of a table larger than memory from storage
    "write",  # writing rows of a table larger than memory to storage
]

HeadPart = Literal["counts", "labels", "hidden states", "statistics", "coefficients", "hidden gradients"]
"""What ranks exchange of the scored positions of an output layer."""

LaunchPart = Literal["whole", "early", "late", "prior", "delayed", "chunk"] | HeadPart
"""The part of a table or bucket: early or late rows, prior gradients or a piece of the delayed ones, or a chunk."""

_SPELLED: dict[Kind, dict[LaunchPart, str]] = {
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
"""Format strings of ids; ids without one show only `what`."""


class OperationId(NamedTuple):
    """The id of a collective, a copy or a piece of compute; equal on all ranks.

    It is a tuple, whose hash runs no Python code, because launchers and recorders look up ids a hundred times per step.

    Attributes:
        kind: the kind of operation.
        what: name of the table, joined table or bucket.
        part: the part of the table or bucket that is sent, such as "early" rows or "delayed" gradients.
        number: the number of a chunk or piece, from 0.
        lane: where the operation runs: compute, a process group, or a direction of copies.
    """

    kind: Kind
    what: str
    part: LaunchPart = "whole"
    number: int = 0
    lane: Lane = "compute"

    def __str__(self) -> str:
        """Returns the id as text, for display and as a key. No code parses it."""
        return _SPELLED.get(self.kind, {}).get(self.part, "{what}").format(what=self.what, number=self.number)

    @property
    def needs_lookahead(self) -> bool:
        """Whether the operation requires that the next batch is known. Such operations exchange the next batch's ids,
        send its rows early, or send gradients of rows that it does not read.
        """
        return self.part in ("early", "delayed") or self.kind == "ids"


IDS = OperationId("ids", "ids", lane="ids")
"""The AllGather of the next batch's ids, of all tables."""

ROW_NORMS = OperationId("all_reduce", "row norms", lane="dense")
"""The AllReduce, between two steps, of the rows' squares of all tables with a row-wise optimizer."""


@cache
def bucket_name(bucket: int) -> str:
    """Returns the name of a bucket in operation ids: "bucket 0"."""
    return f"bucket {bucket}"


@cache
def chunk_id(bucket: int, number: int) -> OperationId:
    """Returns the id of the AllReduce of a chunk of a bucket. `number` is the chunk's index in the bucket."""
    return OperationId("all_reduce", bucket_name(bucket), "chunk", number, "dense")


@cache
def rows_id(table: str, part: LaunchPart) -> OperationId:
    """Returns the id of the AlltoAll that exchanges a table's rows.

    Args:
        part: "whole" (all rows of a batch), "early" (rows of the next batch that this batch does not read) or "late"
            (rows of the next batch that this batch also reads).
    """
    return OperationId("lookups", table, part, lane="embedding")


@cache
def gradients_id(table: str, part: LaunchPart, number: int = 0) -> OperationId:
    """Returns the id of the AlltoAll that exchanges a table's row gradients.

    Args:
        part: "whole" (all rows), "prior" (rows that the next batch reads too) or "delayed" (a piece of all other rows).
        number: the index of the piece, if `part` is "delayed".
    """
    if part == "delayed":
        return OperationId("delayed", table, part, number, "delayed")
    return OperationId("gradients", table, part, number, "embedding")


@cache
def head_id(table: str, part: HeadPart, chunk: int = 0) -> OperationId:
    """Returns the id of an exchange of an output layer whose table is sharded.

    Args:
        part: what is exchanged, such as "labels" or "hidden states".
        chunk: the index of the chunk of positions (labelled tokens) that is exchanged.
    """
    return OperationId("positions", table, part, chunk, "embedding")


def storage_id(kind: Literal["read", "write"], table: str) -> OperationId:
    """Returns the id of reading or writing (`kind`) rows of a table larger than memory."""
    return OperationId(kind, table, lane="storage")


@cache
def compute_id(kind: Kind, subject: str) -> OperationId:
    """Returns the id of a piece of compute for one table or bucket, such as its update.

    Args:
        subject: the name of the table or bucket.
    """
    return OperationId(kind, subject)


EARLY = OperationId("rows", "early rows", "early")
END = OperationId("backward", "end of backward", "late")
BETWEEN = OperationId("update", "optimizer step, next batch", "late")
START = OperationId("forward", "start of forward", "early")
"""Compute operations without a table or bucket: the start and end of a backward, the start of a forward, and the time
between backward and forward."""

OPTIMIZER = OperationId("update", "optimizer step", "late")
OWN_CODE = OperationId("own", "your code", "late")
LOADER = OperationId("loader", "loader", "late")
"""Operations of the training loop between a backward and the next call, known once measured."""
BESIDE = (OWN_CODE, OPTIMIZER, LOADER)

WHOLE_BACKWARD = OperationId("backward", "backward", "late")
WHOLE_FORWARD = OperationId("forward", "forward", "late")
"""The phases of a single process, which has no communication."""
