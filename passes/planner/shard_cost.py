"""Counts a table's cost per step: bytes and work of its shards, by columns or on a grid; work of a whole one."""

from __future__ import annotations

from collections.abc import Mapping

from embrace_fx import cost
from embrace_fx.cost.wire import Wire
from embrace_fx.vocabulary.graph import Table
from embrace_fx.vocabulary.ops import own_columns
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.schedule import LOOKS_AHEAD, SCHEDULES

USEFUL_COLUMNS = 128
"""What shards on a grid have at least, where a table has as many: half a KiB of float32."""
FEWEST_RANKS = 16
"""From which on a grid is weighed: what a grid saves is predicted alone, and columns are what was measured on fewer."""
ROUTED_BYTES = 128
"""Of an id, in a step on a grid: `route_grid` makes eight passes over int64, for the rows and for their gradients."""

UPDATE_PASSES = 8
"""Of an optimizer over parameters, gradients and state: SGD makes 3, Adagrad 11, Adam 14; the planner is told none."""

REPLAY_PASSES = 4
"""Of a step that a row has skipped over its weights: a product, a quotient and two sums."""
LONGEST_TAIL = 128
"""Steps after which a momentum of 0.9 reaches no bit of a float32 any more."""

ONE_WAY: dict[str, int] = {name: 2 if name in LOOKS_AHEAD else 1 for name in SCHEDULES}
"""Schedule -> AlltoAlls in which a table's rows travel, and as many for their gradients: early and late rows, prior and
delayed gradients, where the next batch is known."""

ROUNDS = 7.0
"""Of handling (`Handling.round_ms`), for a launch of a table's: rows or gradients are selected, cut, handed over to the
thread that launches, waited for and put together (`python -m benchmarks.micro.table_rounds`)."""

RowsAtHome = Mapping[int, tuple[int, ...]]
"""Rows of a grid -> how many of the rows that each rank reads are in its own one."""


def widest_useful(table: Table, world_size: int) -> Grid:
    """The grid with most columns of those whose shards have `USEFUL_COLUMNS`, or all that the table has."""
    least = min(USEFUL_COLUMNS, table.embedding_dim)
    divisors = (c for c in range(1, world_size + 1) if world_size % c == 0)
    columns = max((c for c in divisors if table.embedding_dim // c >= least), default=1)
    return Grid(world_size // columns, columns)


def launches_of(schedule: str) -> int:
    """Counts the launches of a sharded table in a step: ids, rows, gradients."""
    return 1 + 2 * ONE_WAY[schedule]


def shard_exchange(
    table: Table,
    rows_by_rank: tuple[int, ...],
    wire: Wire,
    world_size: int,
    grid: Grid | None = None,
    at_home: tuple[int, ...] | None = None,
    schedule: str = "2d",
) -> cost.Exchange:
    """Mean over ranks of what one rank sends per step for a sharded table: ids, rows, gradients.

    Args:
        wire: bytes of its rows' columns on the wire.
        grid: on which it lies; None: by columns.
        at_home: how many of its rows each rank's own row of the grid has; None: as many as any other.
        schedule: which cuts rows and gradients in two, or does not.
    """
    if world_size == 1 or not rows_by_rank:
        return cost.Exchange(0, 0)
    sent_bytes = 0.0  # by all ranks
    columns = grid.columns if grid is not None else world_size
    chunks = [own_columns(table.embedding_dim, columns, column) for column in range(columns)]
    piece_bytes = [wire.piece_bytes(last - first) for first, last in chunks]
    row_bytes = sum(piece_bytes)
    for rank, rows in enumerate(rows_by_rank):
        if grid is None:
            own_bytes = piece_bytes[rank]
            sent_bytes += cost.all_to_all_rows(rows_by_rank, own_bytes, 1, rank).sent_bytes
            sent_bytes += cost.all_to_all_gradients(rows, row_bytes - own_bytes, 1, world_size).sent_bytes
        else:  # all that a rank reads arrives once and leaves once, but for what it owns itself
            own_rows = at_home[rank] if at_home is not None else rows / grid.rows
            sent_bytes += 2 * (rows * row_bytes - own_rows * piece_bytes[grid.place(rank)[1]])
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
    """Adds up the work of a rank's processor per step for a sharded table, at the rank that reads most rows.

    Own columns of all ranks' rows are looked up, its own rows joined; gradients split by columns, those of own columns
    cleared and added up, and these rows updated. Ids are sorted twice: in the union of what a rank reads, and in that
    of all ranks; on a grid only those that the rank's row of it has, once all have been searched for them. Each
    AlltoAll and the AllGather of ids are prepared, and what came with them is taken.
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
    """The work of a sweep: the optimizer moves all rows of a shard, with gradient or without."""
    return cost.passes_over((2 + UPDATE_PASSES) * nbytes / world_size)


def replay_work(table: Table, rows_by_rank: tuple[int, ...], itemsize: int, world_size: int) -> cost.Work:
    """The work per step of rows that take the steps they have skipped when they are next read.

    Every row skips about a step per step, and takes it later; but of one that has rested long, momentum has died away,
    and its steps need not be counted one by one.
    """
    steps = min(table.num_rows, LONGEST_TAIL * sum(rows_by_rank))
    passed_bytes = REPLAY_PASSES * steps * table.embedding_dim * itemsize / world_size
    return cost.passes_over(passed_bytes) + cost.Work(rounds=ROUNDS)


def replica_work(nbytes: int) -> cost.Work:
    """The work of a rank's processor per step for a whole table, whatever its exchange: its gradient has every row.

    It is made, cleared, packed into its bucket, and the optimizer updates every row by it.
    """
    return cost.passes_over((2 + UPDATE_PASSES) * nbytes) + cost.claim(2 * nbytes)
