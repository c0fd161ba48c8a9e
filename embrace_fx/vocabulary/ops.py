"""Declares every `embrace::` op that exchanges data within a step: its schema, its fake kernel and a worked example.

Passes insert these ops, and `embrace_fx.runtime` implements them; neither imports the other. Standard collectives are
`torch.ops._c10d_functional.*`. `_c10d_functional.wait_tensor` waits for every launch, including those of `embrace::`.

Shape legend
    N ranks; V rows of the table; D its columns; d the columns this rank owns (torch.chunk layout: the first ranks own
    ceil(D / N), the last may own fewer or none); U unique rows this rank reads; R = sum of U over ranks; K unique rows
    of R; T tables that exchange ids.

Groups are named by communication class ("ids", "embedding", "dense"). Lowering maps a class to a process group, so that
graphs print alike on every rank and can be tested without processes.

A launch and its wait are in the same phase. Communication that overlaps the next step is *submitted* instead: the
launcher launches it in the order of the schedule, and a later phase *awaits* it or its update (`flow_ops`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from embrace_fx.vocabulary import flow_ops  # noqa: F401  (declares the ops)
from embrace_fx.vocabulary.fake_results import empty_as, op, unknown_size
from embrace_fx.vocabulary.head_ops import HEAD_LAUNCHES
from embrace_fx.vocabulary.operation_id import OperationId

LAUNCHES: frozenset[str] = frozenset(
    {
        "embrace::all_gather_ids",
        "embrace::all_to_all_rows",
        "embrace::all_to_all_gradients",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_reduce_",
        "embrace::exchange_gradient_",
        *HEAD_LAUNCHES,
    }
)
"""Ops whose result is in flight. Only `wait_tensor` returns the value."""

SUBMISSIONS: frozenset[str] = frozenset(
    {"embrace::submit_ids", "embrace::submit_rows", "embrace::submit_gradients", "embrace::submit_chunk"}
)
"""Ops that submit a launch to the launcher and return at once."""

AWAITS: frozenset[str] = frozenset(
    {"embrace::await_ids", "embrace::await_rows", "embrace::update_rows", "embrace::await_chunk"}
)
"""Ops that wait for a launch of this window or the previous one."""

LOCAL_OF_FLOW: frozenset[str] = frozenset({"embrace::join_rows", "embrace::defer_bucket", "embrace::update_bucket"})
"""Ops that neither send nor wait, but are part of communication that overlaps the next step."""


def op_name(node: fx.Node) -> str:
    """Returns the name of the op that a node calls, "namespace::name" without overload, or "" if it calls none."""
    return _full_name(node.target) if isinstance(node.target, OpOverload) else ""


@functools.cache
def _full_name(op: OpOverload) -> str:
    """Returns an op's name as "namespace::name"."""
    return str(op._schema.name)


def argument(node: fx.Node, name: str) -> Any:
    """Returns the value of an argument in the call of an ATen op, or its default if the call does not pass it.

    Args:
        name: the argument's name in the op's schema.
    """
    assert isinstance(node.target, OpOverload)
    for position, parameter in enumerate(node.target._schema.arguments):
        if parameter.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, parameter.default_value)
    raise KeyError(f"{node.target} has no argument {name!r}. Its schema is {node.target._schema}.")


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Sets an argument in the call of an ATen op to `value`.

    Args:
        name: the argument's name in the op's schema.
    """
    assert isinstance(node.target, OpOverload)
    parameters = node.target._schema.arguments
    position = next(k for k, p in enumerate(parameters) if p.name == name)
    args = list(node.args)
    args += [parameters[k].default_value for k in range(len(args), position)]
    args[position : position + 1] = [value]
    node.args = tuple(args)


def draws_random_numbers(node: fx.Node) -> bool:
    """Returns whether a node draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def draws_before(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns all draws of random numbers up to the last one among `nodes`, and the items of their results. If `nodes`
    run before the rest of their graph, these draws must, too: each draw takes the next numbers of the generator.
    """
    last = max(filter(draws_random_numbers, nodes), default=None)
    if last is None:
        return []
    draws = [node for node in last.graph.nodes if node <= last and draws_random_numbers(node)]
    return [*draws, *(user for node in draws for user in node.users if user.target is operator.getitem)]


def device_of(node: fx.Node) -> torch.device:
    """Returns the device of a node's result (the first one, if it has several)."""
    results = node.meta["val"]
    first: Tensor = results[0] if isinstance(results, list | tuple) else results
    return first.device


def launch_of(node: fx.Node) -> OperationId | None:
    """Returns the id of the collective or copy that a node starts or awaits, or None if it does neither."""
    found = node.meta.get("launch")
    assert found is None or isinstance(found, OperationId)
    return found


def id_of(node: fx.Node) -> OperationId:
    """Returns the id of the collective or copy that a node starts or awaits. Raises if it does neither."""
    found = launch_of(node)
    assert found is not None
    return found


def own_columns(embedding_dim: int, world_size: int, rank: int) -> tuple[int, int]:
    """Returns the range [first, end) of the columns of a table that `rank` owns, divided as `torch.chunk` divides
    `embedding_dim` columns.

    >>> [own_columns(10, 4, r) for r in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 10)]
    >>> [own_columns(2, 4, r) for r in range(4)]
    [(0, 1), (1, 2), (2, 2), (2, 2)]
    """
    width = -(-embedding_dim // world_size)
    return min(rank * width, embedding_dim), min((rank + 1) * width, embedding_dim)


@op("join_ids", "(Tensor[] ids, int[] tables, int[] first_rows, int[] num_rows, int joined) -> Tensor[]")
def join_ids(
    ids: Sequence[Tensor], tables: Sequence[int], first_rows: Sequence[int], num_rows: Sequence[int], joined: int
) -> list[Tensor]:
    """Converts ids of several tables to row numbers (int64) of their joined table (`embrace_fx.plan.JoinedTable`).

    Returns a list. If `joined` is not 0, its first tensor (N,) has the row numbers of the first `joined` tensors of
    `ids`, one after the other. Then it has a tensor of row numbers, in the shape of the ids, for each further tensor of
    `ids`. An id outside its table becomes a number outside the joined table, which encodes table and id for
    `JoinedTable.decode_invalid_id`.

    Example: ids [2, 5] of a table of 10 rows, [[0], [3]] of the next table of 5 rows, joined 2 -> [2, 5, 10, 13];
    joined 1 -> [2, 5], [[10], [13]].

    Args:
        tables: for each of `ids`, the index of its table in the joined table.
        first_rows: for each of `ids`, the first row of its table in the joined table.
        num_rows: for each of `ids`, the number of rows of its table.
        joined: how many of `ids` are returned as one tensor.
    """
    sizes = [i.numel() for i in ids]
    rows = empty_as(ids[0], (sum(sizes),), dtype=torch.int64)
    if joined == len(ids):
        return [rows]
    flat, *apart = rows.split_with_sizes([sum(sizes[:joined]), *sizes[joined:]])
    return [
        *([flat] if joined else []),
        *(part.view(i.shape) for part, i in zip(apart, ids[joined:], strict=True)),
    ]


@op("unique_ids", "(Tensor[] ids, int num_rows, int padding_idx) -> Tensor[]")
def unique_ids(ids: Sequence[Tensor], num_rows: int, padding_idx: int) -> list[Tensor]:
    """Finds the unique rows that this rank reads. Returns a list of int64 tensors: [unique (U,), inverse of ids[0],
    inverse of ids[1], ...]. The inverse of a tensor of ids has the same shape, and the position of each id's row in
    `unique`.

    With `padding_idx` >= 0 the padding row is always row 0 of `unique`, even if the batch does not contain it, so that
    later lookups have the static `padding_idx` 0. The other rows are sorted. An id outside the table raises later, in
    `all_gather_ids`, on every rank.

    Example, one rank: ids [[5, 2, 5]], padding_idx -1 -> [2, 5], [1, 0, 1]; padding_idx 5 -> [5, 2], [0, 1, 0].

    Args:
        ids: the ids of each lookup of the table.
        num_rows: the number of rows of the table.
        padding_idx: the row of the table that gets no gradient, or -1.
    """
    unique = empty_as(ids[0], (unknown_size(),), dtype=torch.int64)
    return [unique, *(torch.empty_like(i, dtype=torch.int64) for i in ids)]


@op("all_gather_ids", "(Tensor[] unique, int[] num_rows, str group, int group_size) -> Tensor")
def all_gather_ids(unique: Sequence[Tensor], num_rows: Sequence[int], group: str, group_size: int) -> Tensor:
    """Launches an AllGather of the ids of the rows that each rank reads, for all tables at once. The awaited value is
    opaque int64; `unpack_ids` reads it.

    The ranks first exchange sizes and state, so that an id outside a table, or any failure of a rank, raises on *every*
    rank and no collective is left waiting.

    Args:
        unique: for each table, the unique rows (U,) that this rank reads.
        num_rows: for each table, its number of rows.
        group: the communication class, such as "ids".
        group_size: the number of ranks.
    """
    return empty_as(unique[0], (unknown_size(),), dtype=torch.int64)


@op("unpack_ids", "(Tensor packed, int tables, int group_size) -> Tensor[]")
def unpack_ids(packed: Tensor, tables: int, group_size: int) -> list[Tensor]:
    """Returns a list with two int64 tensors for each table, `ids` and `counts`. `ids` (R,) concatenates the ids that
    each rank reads, in rank order. `counts` (N,), on the host, has the number of each rank's ids.

    Example, two ranks, one table: rank 0 reads [2, 5], rank 1 reads [5] -> ids [2, 5, 5], counts [2, 1] on both.

    Args:
        packed: the awaited value of `all_gather_ids`.
        tables: the number of tables.
        group_size: the number of ranks (N).
    """
    out: list[Tensor] = []
    for _ in range(tables):
        out += [empty_as(packed, (unknown_size(),)), torch.empty((group_size,), dtype=packed.dtype, device="cpu")]
    return out


@op("route_grid", "(Tensor ids, Tensor counts, int rank, int grid_rows, int grid_columns) -> Tensor[]")
def route_grid(ids: Tensor, counts: Tensor, rank: int, grid_rows: int, grid_columns: int) -> list[Tensor]:
    """Finds which of the ids that all ranks read are in this rank's shard of a table, on a grid of ranks
    (`embrace_fx.plan.Grid`).

    Example, a grid of 2 x 1: rank 0 reads [2, 4, 5], rank 1 reads [5, 6], so that ids are [2, 4, 5, 5, 6], counts [3,
    2]. Rank 0 has the even ids, in rows [1, 2, 3] of its shard; rank 1 the odd ones, in rows [2, 2]. Counts are [[2,
    1], [1, 1]] on both; order is [0, 1, 2] on rank 0, [1, 0] on rank 1.

    Args:
        ids, counts: results of `unpack_ids`: the ids (R,) that all ranks read, and each rank's number of them (N,).
        rank: this rank.
        grid_rows, grid_columns: the size of the grid.

    Returns:
        A list of three tensors:

        rows (M,): for each id that is in this rank's shard, in the order of `ids`, its row in the shard.
        counts (N, grid_rows), on the host: the number of each rank's ids in each row of the grid.
        order (U,): the positions of the ids that this rank reads, sorted by row of the grid.
    """
    unknown = [empty_as(ids, (unknown_size(),)) for _ in range(2)]
    return [unknown[0], empty_as(counts, (counts.shape[0], grid_rows)), unknown[1]]


@op("lookup", "(Tensor shard, Tensor ids) -> Tensor")
def lookup(shard: Tensor, ids: Tensor) -> Tensor:
    """Looks up rows in this rank's shard of a table. Returns the rows (R, d), grouped by the rank that reads them.

    Args:
        shard: this rank's d columns of the V rows of the table, (V, d).
        ids: the ids (R,) that all ranks read, in rank order.
    """
    return empty_as(shard, (ids.shape[0], shard.shape[1]))


@op(
    "all_to_all_rows",
    "(Tensor columns, Tensor counts, int embedding_dim, str group, int group_size, int grid_rows=1) -> Tensor",
)
def all_to_all_rows(
    columns: Tensor, counts: Tensor, embedding_dim: int, group: str, group_size: int, grid_rows: int = 1
) -> Tensor:
    """Launches an AlltoAll of table rows. This rank sends its d columns of the rows that all ranks read, and receives
    all D columns of the U rows that it reads. The awaited result has one dimension, (U * D,).

    Rank r receives, from each rank s, the d_s columns that s owns of the U_r rows that r reads. `join_columns` converts
    the result to rows.

    Example, D = 4, rank 0 reads rows a, b and rank 1 reads row b. Columns are written a0 a1 a2 a3:
        rank 0 sends a0 a1 b0 b1 to itself, b0 b1 to rank 1;  rank 1 sends a2 a3 b2 b3 to rank 0, b2 b3 to itself
        rank 0 receives a0 a1 b0 b1 | a2 a3 b2 b3;            rank 1 receives b0 b1 | b2 b3

    On a grid with several rows, `columns` (M, d) and `counts` (N, grid_rows) are results of `route_grid`. Each rank
    sends the pieces that it owns. `join_grid` converts the result to rows.

    Args:
        columns: this rank's d columns of the rows that each rank reads, in rank order, (R, d).
        counts: the number of rows that each rank reads, (N,).
        embedding_dim: the number of columns of the whole table (D).
        group: the communication class, such as "embedding".
        group_size: the number of ranks (N).
        grid_rows: the number of rows of the grid of ranks; 1 if the table is sharded by columns only.
    """
    return empty_as(columns, (unknown_size(),))


@op("join_columns", "(Tensor flat, int embedding_dim, int group_size) -> Tensor")
def join_columns(flat: Tensor, embedding_dim: int, group_size: int) -> Tensor:
    """Joins the awaited result of `all_to_all_rows` into rows (U, D).

    Example: a0 a1 b0 b1 | a2 a3 b2 b3 -> [[a0 a1 a2 a3], [b0 b1 b2 b3]].

    Args:
        flat: (U * D,), one block per sending rank, with that rank's columns of all U rows.
        embedding_dim: the number of columns of the whole table (D).
        group_size: the number of ranks.
    """
    return empty_as(flat, (flat.shape[0] // embedding_dim, embedding_dim))


@op("split_columns", "(Tensor rows, int group_size) -> Tensor")
def split_columns(rows: Tensor, group_size: int) -> Tensor:
    """Splits rows (U, D) into one block of columns for each of `group_size` receiving ranks, one after the other, (U *
    D,). The inverse of `join_columns`.
    """
    return empty_as(rows, (rows.shape[0] * rows.shape[1],))


@op("join_grid", "(Tensor flat, Tensor order, Tensor counts, int embedding_dim, int rank) -> Tensor")
def join_grid(flat: Tensor, order: Tensor, counts: Tensor, embedding_dim: int, rank: int) -> Tensor:
    """Joins the awaited result of `all_to_all_rows` on a grid of ranks into rows (U, D), in the order of the ids that
    this rank reads.

    Example, a grid of 2 x 2, D = 2; rank 0 reads rows 4 and 5, order is [0, 1]. Columns are written a0 a1 for row 4, b0
    b1 for row 5: a0 | a1 | b0 | b1 -> [[a0 a1], [b0 b1]].

    Args:
        flat: (U * D,), one block per sending rank, with that rank's part of the rows.
        order, counts: results of `route_grid`.
        embedding_dim: the number of columns of the whole table (D).
    """
    return empty_as(flat, (flat.shape[0] // embedding_dim, embedding_dim))


@op("split_grid", "(Tensor rows, Tensor order, Tensor counts, int rank) -> Tensor")
def split_grid(rows: Tensor, order: Tensor, counts: Tensor, rank: int) -> Tensor:
    """Splits rows (U, D) into one block for each receiving rank of a grid, one after the other, (U * D,). The inverse
    of `join_grid`. `order` and `counts` are results of `route_grid`.
    """
    return empty_as(rows, (rows.shape[0] * rows.shape[1],))


@op("round_rows", "(Tensor rows, Tensor ids, str form, int grid_columns, str table) -> Tensor")
def round_rows(rows: Tensor, ids: Tensor, form: str, grid_columns: int, table: str) -> Tensor:
    """Rounds row gradients (U, D) to the dtype `form`, separately for each rank's columns. Before that, adds the
    rounding errors from the last time that gradients of the same rows were rounded.

    Example, "int8", one column per rank: the quantization steps of 1.003 and 100 are 1/64 and 1: [[1.003, 100.4]] ->
    [[1, 100]]; the next time the row has the same gradient, [[1.0, 101]].

    Args:
        rows: the gradients.
        ids: the ids (U,) of the rows.
        form: the dtype to round to, such as "int8".
        grid_columns: the number of ranks over which the columns are divided.
        table: the table's name.
    """
    return torch.empty_like(rows)


@op(
    "all_to_all_gradients",
    "(Tensor flat, Tensor counts, int embedding_dim, str group, int group_size, int grid_rows=1) -> Tensor",
)
def all_to_all_gradients(
    flat: Tensor, counts: Tensor, embedding_dim: int, group: str, group_size: int, grid_rows: int = 1
) -> Tensor:
    """Launches the inverse of `all_to_all_rows`: sends the gradients of this rank's rows, and receives this rank's d
    columns of all ranks' gradients, (R * d,).

    The result can be viewed as (R, d), because the blocks arrive in rank order, like the `ids` of `unpack_ids`. On a
    grid it is (M * d,), in the order of the rows that `route_grid` returns.

    Args:
        flat: the gradients (U * D,), one block per receiving rank.

    The other arguments are those of `all_to_all_rows`.
    """
    return empty_as(flat, (unknown_size(),))


@op("coalesce", "(Tensor ids, Tensor flat, int columns, int[] padding_rows, float scale) -> Tensor[]")
def coalesce(ids: Tensor, flat: Tensor, columns: int, padding_rows: Sequence[int], scale: float) -> list[Tensor]:
    """Sums the rows of `flat` that have equal ids, and multiplies the sums by `scale`. Returns [the K unique ids,
    sorted; the sums (K, d)].

    Example, scale 1/2: ids [2, 5, 5], rows [[1], [2], [3]] -> [2, 5], [[0.5], [2.5]].

    Args:
        ids: the id of each row, (R,).
        flat: R rows of d elements, one after the other, (R * d,).
        columns: the number of elements of a row (d).
        padding_rows: ids to leave out, because padding rows have no gradient.
    """
    k = unknown_size()
    return [empty_as(ids, (k,)), empty_as(flat, (k, columns))]


@op("sparse_gradient", "(Tensor gradient, Tensor[] ids, int[] paddings) -> Tensor")
def sparse_gradient(gradient: Tensor, ids: Sequence[Tensor], paddings: Sequence[int]) -> Tensor:
    """Returns the rows of a whole table's gradient (V, D) that lookups of `ids` have read, as a sparse tensor (COO).

    The rows are sorted and unique, and may be zero. On a fake tensor, the result is dense.

    Example: gradient [[0], [1], [0], [3]], ids [[3, 2, 3]], paddings [1] -> rows 2 and 3 with values [[0], [3]].

    Args:
        ids: the ids of each lookup.
        paddings: the padding row of each lookup, which is left out, or -1.
    """
    return torch.empty_like(gradient)


@op("pack_bucket", "(Tensor[] gradients, float scale) -> Tensor")
def pack_bucket(gradients: Sequence[Tensor], scale: float) -> Tensor:
    """Concatenates gradients, each multiplied by `scale`, into one flat tensor."""
    return empty_as(gradients[0], (sum(g.numel() for g in gradients),))


@op("unpack_bucket", "(Tensor(a -> *) flat, Tensor[] like) -> Tensor(a)[]")
def unpack_bucket(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Splits a flat tensor, in which `pack_bucket` has concatenated gradients, into views with the shapes of the
    parameters `like`.
    """
    begin, starts = flat.storage_offset(), accumulate((t.numel() for t in like), initial=0)
    # On fake tensors, `as_strided` is twice as fast as `view`, because torch decomposes `view` in Python.
    return [flat.as_strided(t.shape, _strides(t.shape), begin + start) for t, start in zip(like, starts, strict=False)]


def _strides(shape: Sequence[int]) -> list[int]:
    """Returns the strides of a contiguous tensor of this shape."""
    behind = accumulate((max(size, 1) for size in reversed(shape[1:])), operator.mul, initial=1)
    return list(behind)[: len(shape)][::-1]


@op(
    "exchange_gradient_",
    "(Tensor(a!) flat, int rows, str strategy, str scheme, str group, int group_size) -> Tensor(a!)",
)
def exchange_gradient_(flat: Tensor, rows: int, strategy: str, scheme: str, group: str, group_size: int) -> Tensor:
    """Launches a collective that averages one parameter's packed gradient `flat` (rows * width,) over ranks, in place,
    without sending its zeros. All ranks get the same bits.

    Example, two ranks, rows of one element: [0, 2, 0, 4] and [0, 6, 0, 0] -> [0, 4, 0, 2]; of four rows, two are sent.

    Args:
        rows: the number of rows of the parameter.
        strategy: one of `embrace_fx.plan.EXCHANGES`.
        scheme: "balanced" or "hierarchical" for "zen", else "".
        group: the communication class, such as "dense".
        group_size: the number of ranks.
    """
    return flat
