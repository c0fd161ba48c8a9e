"""Declares the `embrace::` ops for communication that overlaps the next step: submissions, waits and updates.

`launch` is a launch's id (`embrace_fx.vocabulary.operation_id.OperationId`) as text, for readers of the graph; the id
itself is `node.meta["launch"]`.

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embrace_fx.vocabulary.fake_results import empty_as, op, unknown_size


@op("submit_ids", "(Tensor[] ids, str launch) -> Tensor")
def submit_ids(ids: Sequence[Tensor], launch: str) -> Tensor:
    """Submits the AllGather of the next batch's ids to the launcher.

    `ids` (R,) for each table are this batch's, which `await_ids` needs to split rows.
    """
    return empty_as(ids[0], (0,))


@op("await_ids", "(Tensor[] ids, str launch) -> Tensor")
def await_ids(ids: Sequence[Tensor], launch: str) -> Tensor:
    """Waits for the next batch's ids. Splits this batch's rows into prior and delayed, and the next batch's into early
    and late.

    Example, two ranks: this batch reads rows [2, 5] on rank 0 and [5] on rank 1, the next one rows [5, 9] on both. Row
    5 is prior: each rank sends its gradient immediately, and its owners update the row before they look it up for the
    next batch, as a late row. Row 2 is delayed, and row 9 is early.
    """
    return empty_as(ids[0], (0,))


@op("submit_rows", "(Tensor shard, Tensor ids, Tensor counts, str table, ScalarType dtype, str launch) -> Tensor")
def submit_rows(shard: Tensor, ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype, launch: str) -> Tensor:
    """Looks up this rank's columns of a batch's rows, and submits their AlltoAll, in `dtype`, to the launcher.

    `ids` (R,) and `counts` (N,) are results of `unpack_ids` for the forward's batch; for early rows, which a backward
    submits, for the backward's batch. The result is an empty tensor.
    """
    return empty_as(shard, (0,))


@op("await_rows", "(Tensor ids, Tensor counts, str table, ScalarType dtype, str launch) -> Tensor")
def await_rows(ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype, launch: str) -> Tensor:
    """Waits for the rows of `submit_rows`. Returns them as received: flat (k * D,), in blocks by the sending rank."""
    return empty_as(ids, (unknown_size(),), dtype=dtype)


@op("join_rows", "(Tensor[] parts, Tensor ids, Tensor counts, str table) -> Tensor")
def join_rows(parts: Sequence[Tensor], ids: Tensor, counts: Tensor, table: str) -> Tensor:
    """Joins received early and late rows into all rows that this rank reads, flat (U * D,), row after row."""
    return empty_as(parts[0], (unknown_size(),))


@op(
    "submit_gradients",
    "(Tensor rows, Tensor ids, Tensor counts, str table, int[] padding_rows, float scale, str launch) -> Tensor",
)
def submit_gradients(
    rows: Tensor,
    ids: Tensor,
    counts: Tensor,
    table: str,
    padding_rows: Sequence[int],
    scale: float,
    launch: str,
) -> Tensor:
    """Submits gradients (U, D) of rows to the launcher, which sends them to the ranks that own their columns. They are
    of all rows that this rank reads, or of its prior or delayed rows only (see `await_ids`).

    `ids` (R,) and `counts` (N,) are results of `unpack_ids`; `padding_rows` and `scale` are as for `coalesce`. The
    result is an empty tensor that represents the gradient in flight among the backward's outputs.
    """
    return empty_as(rows, (0,))


@op("update_rows", "(Tensor(a) shard, str table, str launch) -> Tensor(a)")
def update_rows(shard: Tensor, table: str, launch: str) -> Tensor:
    """Waits for the last step's row gradients, updates the shard with them in place, and returns the shard."""
    return shard.view(shard.shape)


@op("submit_chunk", "(Tensor(a!) flat, int start, int length, str launch) -> Tensor(a!)")
def submit_chunk(flat: Tensor, start: int, length: int, launch: str) -> Tensor:
    """Submits the in-place AllReduce of elements `start` to `start + length` of a packed bucket, or the sparse exchange
    of the whole bucket if the plan has one. The result shares the bucket's memory.
    """
    return flat


@op("await_chunk", "(Tensor(a) value, str launch) -> Tensor(a)")
def await_chunk(value: Tensor, launch: str) -> Tensor:
    """Waits for a chunk, and returns `value` unchanged: the bucket, or a parameter that the chunk's gradients
    update.
    """
    same: Tensor = torch.ops.aten.alias.default(value)
    return same


@op("defer_bucket", "(Tensor flat, int bucket) -> Tensor")
def defer_bucket(flat: Tensor, bucket: int) -> Tensor:
    """Marks the end of a backward's work on a bucket that is still being reduced. The optimizer and the next forward
    wait for it.

    The result is an empty tensor that represents the gradients among the backward's outputs.
    """
    return empty_as(flat, (0,))


@op("update_bucket", "(Tensor(a -> *)[] parameters, int bucket) -> Tensor(a)[]")
def update_bucket(parameters: Sequence[Tensor], bucket: int) -> list[Tensor]:
    """Applies the last step's update to a bucket's parameters, in place, and returns the parameters."""
    return [torch.ops.aten.alias.default(p) for p in parameters]
