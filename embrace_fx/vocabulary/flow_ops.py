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
    """Submits the AllGather of the next batch's ids to the launcher, which starts collectives in the order of the
    schedule. Returns an empty tensor.

    Args:
        ids: for each table, the ids (R,) that all ranks read for this batch. `await_ids` compares them with the next
            batch's.
        launch: the launch's id as text.
    """
    return empty_as(ids[0], (0,))


@op("await_ids", "(Tensor[] ids, str launch) -> Tensor")
def await_ids(ids: Sequence[Tensor], launch: str) -> Tensor:
    """Waits for the ids of the next batch, and splits the rows of both batches. Returns an empty tensor.

    This batch's rows are split into prior ones, which the next batch also reads, and delayed ones. The next batch's
    rows are split into late ones, which this batch also reads, and early ones.

    Example, two ranks: this batch reads rows [2, 5] on rank 0 and [5] on rank 1, the next one rows [5, 9] on both. Row
    5 is prior: each rank sends its gradient immediately, and its owners update the row before they look it up for the
    next batch, as a late row. Row 2 is delayed, and row 9 is early.

    Args:
        ids: for each table, the ids (R,) that all ranks read for this batch.
        launch: the launch's id as text.
    """
    return empty_as(ids[0], (0,))


@op("submit_rows", "(Tensor shard, Tensor ids, Tensor counts, str table, ScalarType dtype, str launch) -> Tensor")
def submit_rows(shard: Tensor, ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype, launch: str) -> Tensor:
    """Looks up a batch's rows in this rank's columns of a table, and submits their AlltoAll to the launcher, which
    starts collectives in the order of the schedule. Returns an empty tensor.

    Args:
        shard: this rank's d columns of the V rows of `table`, (V, d).
        ids, counts: results of `unpack_ids`: the ids (R,) that all ranks read, and each rank's number of them (N,).
            They are those of the current batch, even in a backward, which submits rows of the next batch.
        table: the table's name.
        dtype: the dtype in which the rows are sent.
        launch: the launch's id as text.
    """
    return empty_as(shard, (0,))


@op("await_rows", "(Tensor ids, Tensor counts, str table, ScalarType dtype, str launch) -> Tensor")
def await_rows(ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype, launch: str) -> Tensor:
    """Waits for the rows that `submit_rows` sends. Returns k rows of D columns as one dimension (k * D,), in one block
    for each sending rank. A block has the columns that the sending rank owns, for all k rows.

    Args:
        ids, counts: as for `submit_rows`.
        table: the table's name.
        dtype: the dtype in which the rows were sent.
        launch: the launch's id as text.
    """
    return empty_as(ids, (unknown_size(),), dtype=dtype)


@op("join_rows", "(Tensor[] parts, Tensor ids, Tensor counts, str table) -> Tensor")
def join_rows(parts: Sequence[Tensor], ids: Tensor, counts: Tensor, table: str) -> Tensor:
    """Joins the received early rows (which the previous batch has not read) and late rows (which it has). Returns the U
    rows of D columns that this rank reads, one after the other, (U * D,).

    Args:
        parts: the early rows and the late rows, each as `await_rows` returns them.
        ids, counts: results of `unpack_ids`: the ids (R,) that all ranks read, and each rank's number of them (N,).
        table: the table's name.
    """
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
    """Submits the AlltoAll of row gradients to the launcher, which sends each row's gradient to the ranks that own the
    row's columns. Returns an empty tensor, which represents the gradient among the backward's outputs.

    Args:
        rows: the gradients (U, D) of the rows that this rank reads: of all rows, or only of the prior or the delayed
            ones (see `await_ids`).
        ids, counts: results of `unpack_ids`: the ids (R,) that all ranks read, and each rank's number of them (N,).
        table: the table's name.
        padding_rows: ids of rows whose gradients are dropped.
        scale: the factor by which the sum over ranks is multiplied.
        launch: the launch's id as text.
    """
    return empty_as(rows, (0,))


@op("update_rows", "(Tensor(a) shard, str table, str launch) -> Tensor(a)")
def update_rows(shard: Tensor, table: str, launch: str) -> Tensor:
    """Waits for the last step's row gradients, updates the shard with them in place, and returns the shard.

    Args:
        shard: this rank's part of `table`.
        table: the table's name.
        launch: the id of the gradients' exchange, as text.
    """
    return shard.view(shard.shape)


@op("submit_chunk", "(Tensor(a!) flat, int start, int length, str launch) -> Tensor(a!)")
def submit_chunk(flat: Tensor, start: int, length: int, launch: str) -> Tensor:
    """Submits an in-place AllReduce of a chunk of a bucket to the launcher: of the elements from `start` to `start +
    length`. If the plan has a sparse exchange for the bucket, submits that exchange of the whole bucket instead.
    Returns `flat`.

    Args:
        flat: the bucket: its gradients, flattened and concatenated.
        launch: the launch's id as text.
    """
    return flat


@op("await_chunk", "(Tensor(a) value, str launch) -> Tensor(a)")
def await_chunk(value: Tensor, launch: str) -> Tensor:
    """Waits for the AllReduce of one chunk of a bucket of gradients, and returns `value` unchanged.

    Args:
        value: the bucket, or a parameter that the chunk's gradients update.
        launch: the launch's id as text.
    """
    same: Tensor = torch.ops.aten.alias.default(value)
    return same


@op("defer_bucket", "(Tensor flat, int bucket) -> Tensor")
def defer_bucket(flat: Tensor, bucket: int) -> Tensor:
    """Marks the end of a backward's work on a bucket of gradients whose AllReduce is still running. The optimizer and
    the next forward wait for the AllReduce. Returns an empty tensor, which represents the gradients among the
    backward's outputs.

    Args:
        flat: the bucket's gradients, flattened and concatenated.
        bucket: the bucket's index in the plan.
    """
    return empty_as(flat, (0,))


@op("update_bucket", "(Tensor(a -> *)[] parameters, int bucket) -> Tensor(a)[]")
def update_bucket(parameters: Sequence[Tensor], bucket: int) -> list[Tensor]:
    """Updates the parameters of a bucket in place with the optimizer, using the last step's gradients. Returns the
    parameters. `bucket` is the bucket's index in the plan.
    """
    return [torch.ops.aten.alias.default(p) for p in parameters]
