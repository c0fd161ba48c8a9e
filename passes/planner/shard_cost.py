"""A table's cost per step: bytes and work of its shards, by columns or on a grid; work of a whole table."""

from __future__ import annotations

from collections.abc import Mapping

from embrace_fx.cost import links as cost
from embrace_fx.cost.wire import Wire
from embrace_fx.vocabulary.graph import Table
from embrace_fx.vocabulary.ops import own_columns
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.schedule import LOOKS_AHEAD, SCHEDULES

USEFUL_COLUMNS = 128
"""Minimum columns of shards on a grid, if the table has as many: half a KiB of float32."""
FEWEST_RANKS = 16
"""Minimum ranks for a grid, whose gain is only predicted. On fewer ranks, columns were measured."""
ROUTED_BYTES = 128
"""Bytes moved per id in a step on a grid: `route_grid` makes eight passes over int64, for rows and for gradients."""

UPDATE_PASSES = 8
"""Passes of an optimizer over parameters, gradients and state: SGD makes 3, Adagrad 11, Adam 14; the planner does not
know which."""

REPLAY_PASSES = 4
"""Passes over a row's weights per deferred step: a product, a quotient and two sums."""
LONGEST_TAIL = 128
"""Steps after which a momentum of 0.9 no longer changes a float32."""

ONE_WAY: dict[str, int] = {name: 2 if name in LOOKS_AHEAD else 1 for name in SCHEDULES}
"""Schedule -> number of AlltoAlls for a table's rows, and as many for their gradients: two (early and late rows, prior
and delayed gradients) if the next batch is known."""

ROUNDS = 7.0
"""Units of handling (`Handling.round_ms`) per launch of a table: rows or gradients are selected, cut, handed over to
the launching thread, awaited and joined (`python -m benchmarks.micro.table_rounds`)."""

LocalRows = Mapping[int, tuple[int, ...]]
"""Number of rows of a grid -> for each rank, the number of rows it reads that are in its own row of the grid."""


def widest_useful(table: Table, world_size: int) -> Grid:
    """Returns the grid with the most columns whose shards have at least `USEFUL_COLUMNS`, or all of the table's."""
    least = min(USEFUL_COLUMNS, table.embedding_dim)
    divisors = (c for c in range(1, world_size + 1) if world_size % c == 0)
    columns = max((c for c in divisors if table.embedding_dim // c >= least), default=1)
    return Grid(world_size // columns, columns)


def launches_of(schedule: str) -> int:
    """Returns the count of launches of a sharded table in a step: ids, rows and gradients."""
    return 1 + 2 * ONE_WAY[schedule]


def shard_exchange(
    table: Table,
    rows_by_rank: tuple[int, ...],
    wire: Wire,
    world_size: int,
    grid: Grid | None = None,
    local_rows: tuple[int, ...] | None = None,
    schedule: str = "2d",
) -> cost.Exchange:
    """Returns the bytes that one rank sends per step for a sharded table (ids, rows, gradients), as the mean over
    ranks.

    Args:
        wire: the format of its rows' columns on the wire.
        grid: the grid of its shards, or None if they are cut by columns.
        local_rows: the count of rows that each rank reads in its own row of the grid, or None for an even share.
        schedule: determines whether rows and gradients are split in two.
    """
    if world_size == 1 or not rows_by_rank:
        return cost.Exchange(0, 0)
    sent_bytes = 0.0  # over all ranks
    grid = grid or Grid(1, world_size)
    chunks = [own_columns(table.embedding_dim, grid.columns, column) for column in range(grid.columns)]
    piece_bytes = [wire.piece_bytes(last - first) for first, last in chunks]
    for rank, rows in enumerate(rows_by_rank):  # each row read is received and sent once, except own pieces
        own_rows = local_rows[rank] if local_rows is not None else rows / grid.rows
        sent_bytes += 2 * (rows * sum(piece_bytes) - own_rows * piece_bytes[grid.place(rank)[1]])
    both_ways = cost.Exchange(round(sent_bytes / world_size), 2 * ONE_WAY[schedule] * (world_size - 1))
    return both_ways + cost.gather_ids(rows_by_rank, table.num_rows)


def shard_work(
    table: Table,
    rows_by_rank: tuple[int, ...],
    itemsize: int,
    world_size: int,
    grid: Grid | None = None,
    schedule: str = "2d",
) -> cost.Work:
    """Adds up the work of a rank's processor per step for a sharded table, on the rank that reads the most rows.

    The rank looks up its columns of all ranks' rows, and joins the columns of its own rows. It splits gradients by
    columns, clears and sums the gradients of its columns, and updates these rows. It sorts ids twice: its own ids, and
    the ids of all ranks. On a grid it searches all ids for the ids of its row, and sorts these. It prepares and
    receives each AlltoAll and the AllGather of ids.
    """
    if world_size == 1 or not rows_by_rank:
        return cost.Work()
    everyone, most = sum(rows_by_rank), max(rows_by_rank)
    row_bytes = table.embedding_dim * itemsize
    own_columns_bytes = everyone * row_bytes / world_size
    arriving = cost.claim(own_columns_bytes) + cost.claim(most * row_bytes)
    units = cost.Work(units=everyone / (grid.rows if grid is not None else 1) + most)
    routed = cost.passes_over(everyone * ROUTED_BYTES if grid is not None else 0)
    passed_bytes = (3 + UPDATE_PASSES) * own_columns_bytes + 2 * most * row_bytes
    rounds = cost.Work(rounds=ROUNDS * launches_of(schedule))
    return cost.passes_over(passed_bytes) + arriving + units + routed + rounds


def sweep_work(nbytes: int, world_size: int) -> cost.Work:
    """Returns the work of an optimizer step on all rows of a shard."""
    return cost.passes_over((2 + UPDATE_PASSES) * nbytes / world_size)


def replay_work(table: Table, rows_by_rank: tuple[int, ...], itemsize: int, world_size: int) -> cost.Work:
    """Returns the work per step if rows apply deferred steps when they are next read.

    Every row defers about one step per step and applies it later. After `LONGEST_TAIL` deferred steps the momentum has
    died out, and further steps cost nothing.
    """
    steps = min(table.num_rows, LONGEST_TAIL * sum(rows_by_rank))
    passed_bytes = REPLAY_PASSES * steps * table.embedding_dim * itemsize / world_size
    return cost.passes_over(passed_bytes) + cost.Work(rounds=ROUNDS)


def replica_work(nbytes: int) -> cost.Work:
    """Returns the work of a rank's processor per step for a whole table under any exchange.

    Its gradient has every row. It is allocated, cleared and packed into its bucket, and updates every row.
    """
    return cost.passes_over((2 + UPDATE_PASSES) * nbytes) + cost.claim(2 * nbytes)
