"""Prices steps: a table's bytes and work, in shards or whole, and the time that communication adds under each schedule.

Contract
    Pure functions of tables, rows, a captured graph, a plan for it, and the plan's links.

    waits    transfers that compute waits for
    beside   other transfers, which take `Cluster.busy` of their time from a processor shared with compute
    work     a processor's work for tables, and for the extra operations of a schedule

    A window's transfers share one link. Under "none" and "horizontal", the forward first waits for ids and rows. Under
    "vertical" and "2d", half of the rows have arrived before, and half of their gradients may arrive later. Under
    "none" and "vertical" the backward waits for buckets, under the others the next forward does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import fx

from embrace_fx.cost import links as cost
from embrace_fx.cost.wire import Wire
from embrace_fx.passes.node_cost import NodeMs, node_time_estimator
from embrace_fx.vocabulary.graph import Gradient, TableSpec, TrainingGraph, after_tangents, gradients_of
from embrace_fx.vocabulary.ops import own_columns
from embrace_fx.vocabulary.plan import EXCHANGES, SHARDED, Decision, Grid, Plan
from embrace_fx.vocabulary.schedule import FULL, INTO_FORWARD, LOOKS_AHEAD, SCHEDULES

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


def widest_useful_grid(table: TableSpec, world_size: int) -> Grid:
    """Returns the grid that splits columns among the most ranks while each shard has at least `USEFUL_COLUMNS` columns.
    A table with fewer columns is not split by columns.
    """
    least = min(USEFUL_COLUMNS, table.embedding_dim)
    divisors = (c for c in range(1, world_size + 1) if world_size % c == 0)
    columns = max((c for c in divisors if table.embedding_dim // c >= least), default=1)
    return Grid(world_size // columns, columns)


def launches_per_step(schedule: str) -> int:
    """Returns the number of collectives per step that exchange the ids, rows and gradients of a sharded table under a
    schedule.
    """
    return 1 + 2 * ONE_WAY[schedule]


def shard_exchange(
    table: TableSpec,
    rows_by_rank: tuple[int, ...],
    wire: Wire,
    grid: Grid | None = None,
    local_rows: tuple[int, ...] | None = None,
    schedule: str = "2d",
) -> cost.Exchange:
    """Returns the bytes and messages that one rank sends per step for a sharded table (ids, rows, gradients), averaged
    over ranks.

    Args:
        rows_by_rank: the number of unique rows that each rank reads.
        wire: the dtype in which rows are sent.
        grid: the grid of the shards, or None if the table is sharded by columns.
        local_rows: for each rank, how many of the rows that it reads are stored in its own row of the grid. None to
            assume an even share.
        schedule: the name of the schedule, which determines whether rows and gradients are sent in two parts.
    """
    if not rows_by_rank:
        return cost.Exchange(0, 0)
    sent_bytes, world_size = 0.0, len(rows_by_rank)  # bytes of all ranks
    grid = grid or Grid(1, world_size)
    chunks = [own_columns(table.embedding_dim, grid.columns, column) for column in range(grid.columns)]
    piece_bytes = [wire.row_bytes(last - first) for first, last in chunks]
    # Each row that is read is received once and sent once, except the columns that the rank owns.
    for rank, rows in enumerate(rows_by_rank):
        own_rows = local_rows[rank] if local_rows is not None else rows / grid.rows
        sent_bytes += 2 * (rows * sum(piece_bytes) - own_rows * piece_bytes[grid.place(rank)[1]])
    both_ways = cost.Exchange(round(sent_bytes / world_size), 2 * ONE_WAY[schedule] * (world_size - 1))
    return both_ways + cost.predict_id_exchange(rows_by_rank, table.num_rows)


def shard_work(
    table: TableSpec,
    rows_by_rank: tuple[int, ...],
    itemsize: int,
    grid: Grid | None = None,
    schedule: str = "2d",
) -> cost.Work:
    """Returns the processor work per step of the rank that reads the most rows of a sharded table.

    The rank looks up its columns of all ranks' rows, and joins the columns of its own rows. It splits gradients by
    columns, clears and sums the gradients of its columns, and updates these rows. It sorts ids twice: its own ids, and
    the ids of all ranks. On a grid of ranks, it also selects and sorts the ids in its row of the grid. It prepares and
    receives each AlltoAll and the AllGather of ids.

    Args:
        rows_by_rank: the number of unique rows that each rank reads.
        itemsize: the bytes of an element as it is sent.
        schedule: the name of the schedule.
    """
    if not rows_by_rank:
        return cost.Work()
    everyone, most = sum(rows_by_rank), max(rows_by_rank)
    row_bytes = table.embedding_dim * itemsize
    own_columns_bytes = everyone * row_bytes / len(rows_by_rank)
    arriving = cost.new_memory_work(own_columns_bytes) + cost.new_memory_work(most * row_bytes)
    units = cost.Work(units=everyone / (grid.rows if grid is not None else 1) + most)
    routed = cost.passes_work(everyone * ROUTED_BYTES if grid is not None else 0)
    passed_bytes = (3 + UPDATE_PASSES) * own_columns_bytes + 2 * most * row_bytes
    rounds = cost.Work(rounds=ROUNDS * launches_per_step(schedule))
    return cost.passes_work(passed_bytes) + arriving + units + routed + rounds


def sweep_work(nbytes: int, world_size: int) -> cost.Work:
    """Returns a rank's processor work in an optimizer step that updates every row of its shard.

    Args:
        nbytes: the bytes of the whole table.
    """
    return cost.passes_work((2 + UPDATE_PASSES) * nbytes / world_size)


def replay_work(table: TableSpec, rows_by_rank: tuple[int, ...], itemsize: int, world_size: int) -> cost.Work:
    """Returns the processor work per step of a table whose rows apply deferred optimizer steps when they are next read.

    Each step defers about one update of every row, which is applied later. After `LONGEST_TAIL` deferred updates the
    momentum is zero, and further updates cost nothing.

    Args:
        rows_by_rank: the number of unique rows that each rank reads.
        itemsize: the bytes of an element.
    """
    steps = min(table.num_rows, LONGEST_TAIL * sum(rows_by_rank))
    passed_bytes = REPLAY_PASSES * steps * table.embedding_dim * itemsize / world_size
    return cost.passes_work(passed_bytes) + cost.Work(rounds=ROUNDS)


def replica_work(nbytes: int) -> cost.Work:
    """Returns a rank's processor work per step for a table that is kept whole, without the exchange.

    The gradient has every row. It is allocated, cleared and packed into its bucket, and every row is updated.

    Args:
        nbytes: the bytes of the table.
    """
    return cost.passes_work((2 + UPDATE_PASSES) * nbytes) + cost.new_memory_work(2 * nbytes)


STEP_ROUNDS = {"none": 0.0, "horizontal": 6.0, "vertical": 8.0, "2d": 10.0}
UPDATE_ROUNDS = 2.5
"""Units of handling (`Handling.round_ms`) that a step takes beyond "none", besides its tables: once, and for each
bucket that the forward updates, where "none" steps all at once (`python -m benchmarks.micro.table_rounds`)."""

ERROR = 0.2
"""Relative error of predicted waits and work: a gain below this share of the difference does not count."""

SHORTER = 0.99
"""Another schedule's predicted step must be below this fraction."""

LEAST_MS = 0.05
"""Hidden times below this are printed as none."""


@dataclass(frozen=True)
class StepTime:
    """The parts of a step's time, in milliseconds: compute, and what communication adds to it.

    Attributes:
        waits_ms: the time that compute waits for transfers.
        work_ms: the processor work for exchanges, and the processor time that concurrent transfers take.
        compute_ms: the compute of the model.
    """

    waits_ms: float
    work_ms: float
    compute_ms: float

    @property
    def step_ms(self) -> float:
        """The predicted time of the whole step, in milliseconds."""
        return self.compute_ms + self.waits_ms + self.work_ms


def explain_choice(price: Mapping[str, StepTime], chosen: str) -> str:
    """Explains in one line why a schedule was chosen: how much communication it hides and how much work it adds.
    `price` maps schedules to step times.
    """
    shown = chosen if chosen != "none" else FULL
    hides_ms = price["none"].waits_ms - price[shown].waits_ms
    costs_ms = price[shown].work_ms - price["none"].work_ms
    hides, costs, saves = ("hides", "costs", "saves") if chosen != "none" else (f'"{FULL}" would hide', "cost", "save")
    hidden = f"{hides_ms:.1f} ms of transfers a step" if hides_ms >= LEAST_MS else "no transfers"
    work = f"{costs} {costs_ms:.1f}" if costs_ms >= 0 else f"{saves} {-costs_ms:.1f}"
    return f'"{chosen}": {hides} {hidden} and {work} ms of a processor'


def cheapest_schedule(price: Mapping[str, StepTime], current: str | None = None) -> str:
    """Returns the schedule with the shortest step time in `price`. Among schedules whose times are too close to tell
    apart, returns the one with the least work.

    Args:
        price: maps schedules to step times.
        current: the schedule to keep unless the step is clearly shorter under another one.
    """
    best, *others = sorted(price, key=lambda name: (name != current, price[name].work_ms))
    for name in others:
        if _clearly_shorter(price[name], price[best]):
            best = name
    return best


def _clearly_shorter(one: StepTime, other: StepTime) -> bool:
    """Returns whether step `one` is shorter than step `other` by more than the error of the prediction."""
    differs_ms = abs(other.waits_ms - one.waits_ms) + abs(other.work_ms - one.work_ms)
    return one.step_ms < SHORTER * other.step_ms and other.step_ms - one.step_ms > ERROR * differs_ms


@dataclass(frozen=True)
class _Compute:
    """A step's estimated compute, in milliseconds.

    Attributes:
        step_ms: the whole compute of the step.
        backward_ms: the whole compute of the backward.
        ready_ms: maps each parameter to the milliseconds of the backward's compute before its gradient is ready.
    """

    step_ms: float
    backward_ms: float
    ready_ms: dict[str, float]


@dataclass(frozen=True)
class _RowExchange:
    """The predicted exchanges of ids, rows and gradients for tables that are exchanged together, in milliseconds.

    Attributes:
        one_way_ms: the time to exchange rows. The exchange of gradients takes the same time.
        ids_ms: the time to exchange ids.
        ready_ms: the backward's compute before the gradients of all these tables are ready.
    """

    one_way_ms: float
    ids_ms: float
    ready_ms: float


def has_compute(graph: TrainingGraph) -> bool:
    """Returns whether a graph has compute that can hide transfers. A graph that only exchanges gradients has none."""
    made = [node for node, role in graph.outputs() if isinstance(role, Gradient) and node is not None]
    return any(node.op != "placeholder" for node in made)


def step_times(graph: TrainingGraph, plans: Mapping[str, Plan]) -> dict[str, StepTime]:
    """Predicts, for each schedule, the parts of a step's time under that schedule's plan."""
    node_ms = node_time_estimator(next(iter(plans.values())).links.compute, graph.expected)
    return {name: _step_time(plan, _estimate_compute(graph, plan, node_ms)) for name, plan in plans.items()}


def _step_time(plan: Plan, compute: _Compute) -> StepTime:
    """Predicts the parts of a step's time under a plan, given its compute."""
    schedule, cluster = plan.schedule_name, plan.links.flattened(plan.world_size)
    rows = [_estimate_row_exchange(plan, tables, cluster, compute) for tables in plan.row_exchanges.values()]
    buckets = [_estimate_bucket(plan, names, compute) for names in plan.buckets]
    awaited = 0.5 if schedule in LOOKS_AHEAD else 1.0
    head_ms = sum(awaited * each.one_way_ms for each in rows)
    head_ms += 0.0 if schedule in LOOKS_AHEAD else sum(each.ids_ms for each in rows)
    at_end = [(each.ready_ms, awaited * each.one_way_ms) for each in rows]
    end_ms = _end_ms(at_end if schedule in INTO_FORWARD else chain(at_end, buckets))
    waits_ms = head_ms + max(end_ms - compute.backward_ms, 0.0)
    sent_ms = sum(2 * each.one_way_ms + each.ids_ms for each in rows) + sum(ms for _, ms in buckets)
    waits_ms += max(sent_ms - compute.step_ms - waits_ms, 0.0)
    beside_ms = max(sent_ms - waits_ms, 0.0)
    shared = sum(len(tables) - 1 for tables in plan.row_exchanges.values())
    rounds = STEP_ROUNDS[schedule] - shared * ROUNDS * launches_per_step(schedule)
    rounds += UPDATE_ROUNDS * len(buckets) if schedule in INTO_FORWARD else 0.0
    tables_ms = sum(_table_work_ms(each, plan.world_size, cluster, schedule) for each in plan if each.is_table)
    work_ms = rounds * cluster.handling.round_ms + tables_ms + cluster.busy * beside_ms
    return StepTime(waits_ms, work_ms, compute.step_ms)


def _estimate_compute(graph: TrainingGraph, plan: Plan, node_ms: NodeMs) -> _Compute:
    """Estimates the compute of a step on the plan's processors, and when each gradient is ready. The backward of a
    lookup counts only if the table is kept whole.

    Args:
        node_ms: function that returns the milliseconds of a node.
    """
    left_out = {name for t in graph.tables if t.parameter in plan.sharded for use in t.uses for name in use.backward}
    of_backward = after_tangents(graph.module)
    step_ms = backward_ms = 0.0
    done_ms: dict[fx.Node, float] = {}
    for node in graph.graph.nodes:
        ms = 0.0 if node.name in left_out else node_ms(node) / plan.links.pace
        step_ms += ms
        backward_ms += ms if node in of_backward else 0.0
        done_ms[node] = backward_ms
    gradients = gradients_of(graph.module).items()
    ready_ms = {name: done_ms[node] for name, node in gradients if node is not None}
    return _Compute(step_ms, backward_ms, ready_ms)


def _estimate_row_exchange(plan: Plan, tables: Sequence[str], cluster: cost.Cluster, compute: _Compute) -> _RowExchange:
    """Predicts the exchanges of several tables that are exchanged together, given the step's compute."""
    ids = [ids_exchange(plan[name], plan.world_size) for name in tables]
    one_way_bytes = sum(rows_bytes(plan[name], plan.world_size) for name in tables) // 2
    messages = ONE_WAY[plan.schedule_name] * (plan.world_size - 1)
    together = cost.Exchange(sum(each.sent_bytes for each in ids), ids[0].messages)
    return _RowExchange(
        cost.Exchange(one_way_bytes, messages).time_ms(cluster, "all_to_all"),
        together.time_ms(cluster, "all_gather"),
        max(compute.ready_ms.get(name, 0.0) for name in tables),
    )


def rows_bytes(decision: Decision, world_size: int) -> int:
    """Returns the bytes that a rank sends per step for a sharded table's rows and their gradients.

    Args:
        decision: the plan's decision for the table.
        world_size: the number of ranks.
    """
    of_head = decision.head.sent_bytes if decision.head is not None else 0
    besides = decision.norm_bytes + of_head + ids_exchange(decision, world_size).sent_bytes
    return max(decision.sent_bytes_per_step - besides, 0)


def one_way_bytes(plan: Plan, tables: Iterable[str]) -> int:
    """Returns the bytes that a rank sends per step for the rows of some tables, without the gradients of these rows,
    which take the same number of bytes.
    """
    return sum(rows_bytes(plan[table], plan.world_size) for table in tables) // 2


def ids_exchange(decision: Decision, world_size: int) -> cost.Exchange:
    """Returns the bytes and messages that a sharded table adds to the exchange of ids per step, if ranks read as many
    rows as the plan expects.

    Args:
        decision: the plan's decision for the table.
        world_size: the number of ranks.
    """
    own = decision.rows.own if decision.rows is not None else 0
    return cost.predict_id_exchange((own,) * world_size, decision.shape[0])


def _estimate_bucket(plan: Plan, names: Sequence[str], compute: _Compute) -> tuple[float, float]:
    """Returns (milliseconds of the backward's compute before all gradients of a bucket are ready, milliseconds of the
    bucket's transfer).

    Args:
        names: the parameters in the bucket.
    """
    ready_ms = max(compute.ready_ms.get(name, 0.0) for name in names)
    return ready_ms, bucket_ms(plan, names)


def bucket_ms(plan: Plan, names: Sequence[str]) -> float:
    """Predicts the milliseconds of a bucket's transfer.

    Args:
        names: the parameters in the bucket.
    """
    if plan[names[0]].strategy in EXCHANGES:
        return plan[names[0]].predicted_ms
    sent = cost.Exchange(sum(plan[name].sent_bytes_per_step for name in names), 2 * (plan.world_size - 1))
    return sent.time_ms(plan.links.flattened(plan.world_size), "all_reduce")


def _end_ms(ready_and_transfer_ms: Iterable[tuple[float, float]]) -> float:
    """Returns when the last of several transfers ends, if each starts once its data is ready and the link is free."""
    end_ms = 0.0
    for ready_ms, transfer_ms in sorted(ready_and_transfer_ms):
        end_ms = max(end_ms, ready_ms) + transfer_ms
    return end_ms


def _table_work_ms(decision: Decision, world_size: int, cluster: cost.Cluster, schedule: str) -> float:
    """Predicts the processor time, in milliseconds per step, that a table's exchange takes under `schedule`, excluding
    transfers.

    Args:
        decision: the plan's decision for the table.
        world_size: the number of ranks.
    """
    sent_bytes, others = decision.sent_bytes_per_step, world_size - 1
    if decision.strategy in SHARDED:
        sent_ms = cluster.transfer_ms(sent_bytes, launches_per_step(schedule) * others, "all_to_all")
    elif decision.strategy == "allreduce":
        sent_ms = cluster.transfer_ms(sent_bytes, 2 * others, "all_reduce")
    else:  # the time of a sparse exchange counts as a transfer, including its work on rows
        return 0.0
    return max(decision.predicted_ms - sent_ms, 0.0)
