"""The plan: how each parameter is distributed (its strategy), with reason and predicted cost. Equal on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from embrace_fx.cost.links import Cluster
from embrace_fx.cost.storage import RowMemory
from embrace_fx.cost.wire import Format
from embrace_fx.vocabulary.head import HeadPlan
from embrace_fx.vocabulary.joined_table import JoinedTable
from embrace_fx.vocabulary.plain_data import read_json, write_json
from embrace_fx.vocabulary.plan_text import explain, preformatted, render
from embrace_fx.vocabulary.schedule import FULL, LOOKS_AHEAD
from embrace_fx.vocabulary.sizes import RowCounts

STRATEGIES = ("allreduce", "allgather", "alltoall", "omnireduce", "zen", "ps", "vocabulary")
"""The ways to keep a parameter consistent. "alltoall" shards a table and exchanges its rows by AlltoAll. "vocabulary"
shards the rows of a table that an output layer also reads, and computes each logit on the rank that owns the row. The
others exchange the gradients of replicas, "allreduce" densely."""
SHARDED = ("alltoall", "vocabulary")
"""The strategies of sharded tables."""
EXCHANGES = tuple(name for name in STRATEGIES if name not in ("allreduce", *SHARDED))
"""The strategies of replicas whose exchange is sparse (`embrace_fx.runtime.exchanges`)."""
BY_ROWS = tuple(name for name in EXCHANGES if name != "omnireduce")
"""The sparse exchanges that send rows instead of blocks. They keep autograd's sparse gradients sparse."""
CANDIDATES = tuple(name for name in STRATEGIES if name not in ("omnireduce", "vocabulary"))
"""The strategies that "auto" compares for a table that only lookups read. "omnireduce" must be requested, because
neither the cost model nor any measurement has found it to be the fastest (`docs/strategies.md`)."""

LinksAre = Literal["assumed", "given", "probed"]
"""The origin of a plan's links: the default `Cluster`, the user's, or a measurement between the ranks."""


@dataclass(frozen=True)
class Grid:
    """A grid of ranks, `rows` x `columns`, over which one table is sharded by rows and by columns.

    Rank r * columns + c owns rows r, r + rows, r + 2 * rows, .. of the table. Of these rows it owns one chunk of
    columns, chunk c of the `columns` chunks that `torch.chunk` would make. A grid of one row is the plain layout of
    column shards. Rows are interleaved instead of divided into ranges, because vocabularies are sorted by frequency,
    and the first range would get most of the reads.

    >>> Grid(2, 4).place(6)
    (1, 2)
    """

    rows: int
    columns: int

    def place(self, rank: int) -> tuple[int, int]:
        """Returns (row, column) of a rank in the grid."""
        return divmod(rank, self.columns)

    def own_rows(self, num_rows: int, rank: int) -> slice:
        """Returns the slice of the rows of a table that a rank owns. Row `id` of the table is row `id // rows` of the
        rank's shard.
        """
        return slice(self.place(rank)[0], num_rows, self.rows)

    def takes(self, num_rows: int) -> bool:
        """Returns whether torch's DTensor placements can express this grid for a table of `num_rows` rows.

        They cannot if chunks of equal size fill fewer than `rows` ranks, which happens only for a few tables of up to
        rows * (rows - 1) rows.
        """
        return num_rows <= self.rows or -(-num_rows // -(-num_rows // self.rows)) == self.rows

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} grid"


@dataclass(frozen=True)
class Candidate:
    """A strategy that was compared for one parameter.

    Attributes:
        strategy: one of `STRATEGIES`.
        scheme: for "zen": "balanced" or "hierarchical"; else "".
        sent_bytes_per_step: predicted payload that one rank sends per step, averaged over ranks.
        predicted_ms: predicted time of the exchange on an idle link. For a table, includes the compute of lookups and
            updates. Strategies are compared by this time.
        memory_bytes: bytes of parameter, gradient and exchange buffers on one rank, without optimizer state.
        rejected: the reason why the strategy was not chosen, in a few words, or "" if it was chosen.
        grid: the grid of ranks over which a table is sharded, if it has more than one row; else None.
    """

    strategy: str
    scheme: str
    sent_bytes_per_step: int
    predicted_ms: float
    memory_bytes: int
    rejected: str
    grid: Grid | None = None

    @property
    def name(self) -> str:
        """The name of the strategy with its scheme or grid, such as "zen, balanced"."""
        return _strategy_name(self.strategy, self.scheme, self.grid)


def _strategy_name(strategy: str, scheme: str, grid: Grid | None) -> str:
    """Returns a strategy's name with its scheme or grid, such as "zen, balanced"."""
    kind = scheme or str(grid or "")
    return f"{strategy}, {kind}" if kind else strategy


@dataclass(frozen=True)
class Decision:
    """The strategy decided for one parameter, with its reason and predicted cost.

    Attributes:
        parameter: the parameter's name in the user's model.
        shape: the shape of the whole parameter.
        is_table: whether a lookup reads the parameter.
        strategy: one of `STRATEGIES`, "frozen" (no gradient), "unused" (no rank's forward reads it) or "local" (each
            rank has its own).
        reason: why this strategy was chosen, in one line.
        sent_bytes_per_step: predicted payload that one rank sends per step, averaged over ranks. Does not include
            framing by the transport (gloo adds 144 bytes per message, TCP and Ethernet 66 per packet).
        ddp_bytes_per_step: the bytes per step that DDP's AllReduce would send for the parameter.
        predicted_ms: time of the exchange alone on an idle link. For a table, includes a rank's compute for lookups and
            updates of its rows in a step.
        scheme: for "zen": "balanced" or "hierarchical"; else "".
        grid: the grid of shards, if it has more than one row; else None.
        candidates: the compared strategies: `CANDIDATES` and the requested one; empty if there was no choice.
        measured: the measured sparsity of a table's gradients on all ranks, in one line, or "" if unknown.
        defers_rows: for shards, whether updates of rows without a gradient are deferred until the rows are next read.
        padding_idx: the row of a table that gets no gradient, or -1.
        rows: the number of table rows that a step is expected to read, or None if unknown.
        head: how the output layer exchanges hidden states, for a table of strategy "vocabulary"; else None.
        norm_bytes: the part of `sent_bytes_per_step` for sums of squares of rows, which row-wise optimizers need.
        travels_as: the dtype in which rows or gradients are sent.
        memory: for a table larger than memory: how many rows are in memory, and how many a step reads from storage.
        sparse: whether a table's gradient is sparse (COO), as its lookups request.
    """

    parameter: str
    shape: tuple[int, ...]
    is_table: bool
    strategy: str
    reason: str
    sent_bytes_per_step: int
    ddp_bytes_per_step: int
    predicted_ms: float
    scheme: str = ""
    grid: Grid | None = None
    candidates: tuple[Candidate, ...] = ()
    measured: str = ""
    defers_rows: bool = False
    padding_idx: int = -1
    rows: RowCounts | None = None
    norm_bytes: int = 0
    head: HeadPlan | None = None
    travels_as: Format = "exact"
    memory: RowMemory | None = None
    sparse: bool = False

    @property
    def name(self) -> str:
        """The name of the strategy with its scheme or grid, such as "zen, balanced"."""
        return _strategy_name(self.strategy, self.scheme, self.grid)


@dataclass(frozen=True)
class Plan:
    """How a model is trained on several ranks: a strategy for each parameter, buckets, and a schedule.

    Attributes:
        world_size: number of ranks.
        decisions: one per parameter, in the model's order.
        buckets: names of parameters whose gradients are reduced together, in launch order. A parameter with a sparse
            exchange has a bucket of its own.
        renormed: unsharded tables with `max_norm`, whose replicas must rescale the same rows.
        links: the cluster for which strategies were compared, and sizes of buckets and blocks were chosen.
        links_are: whether the links were measured, given by the user, or assumed.
        watched: tables whose best strategy depends on how many rows ranks read. They may be planned again if that
            number changes.
        history: why each earlier plan was replaced, one line each.
        spaces: joined tables, each of which stacks several of the sharded tables.
        schedule_name: the name of the schedule, one of `SCHEDULES`.
        chosen_because: why the schedule was chosen, in one line, or "" if schedules were not compared.
    """

    world_size: int
    decisions: tuple[Decision, ...]
    buckets: tuple[tuple[str, ...], ...]
    renormed: tuple[str, ...] = ()
    links: Cluster = Cluster()
    links_are: LinksAre = "assumed"
    watched: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    spaces: tuple[JoinedTable, ...] = ()
    schedule_name: str = FULL
    chosen_because: str = ""

    @cached_property
    def sharded(self) -> tuple[str, ...]:
        """Names of the tables that are sharded, by columns or on a grid."""
        return tuple(d.parameter for d in self.decisions if d.strategy in SHARDED)

    @property
    def divided(self) -> tuple[str, ...]:
        """Names of the tables of which each rank stores only a part. These are the sharded tables, or none if there is
        a single rank.
        """
        return self.sharded if self.world_size > 1 else ()

    @property
    def heads(self) -> dict[str, HeadPlan]:
        """Maps each table with the strategy "vocabulary", which an output layer reads, to how that layer exchanges
        hidden states.
        """
        return {d.parameter: d.head or HeadPlan() for d in self.decisions if d.strategy == "vocabulary"}

    @property
    def overlapped(self) -> dict[str, tuple[str, ...]]:
        """Maps the name of each exchange of table rows that may overlap the next step to the names of the tables that
        it exchanges. The name is that of a sharded table or of a joined table.
        """
        return {name: tables for name, tables in self.row_exchanges.items() if name not in self.heads}

    @property
    def looks_ahead(self) -> bool:
        """Whether a step already sends rows that only the next batch reads."""
        return self.schedule_name in LOOKS_AHEAD and bool(self.divided and self.overlapped)

    @property
    def grids(self) -> dict[str, Grid]:
        """Maps each sharded table to the grid of ranks over which it is sharded, for grids of more than one row."""
        return {d.parameter: d.grid for d in self.decisions if d.grid is not None}

    @property
    def rows(self) -> dict[str, RowCounts]:
        """Maps each table or joined table to the number of rows that a step is expected to read, if known."""
        found = {d.parameter: d.rows for d in self.decisions if d.rows is not None}
        for space in self.spaces:
            if all(table in found for table in space.tables):
                found[space.name] = RowCounts.total([found[table] for table in space.tables])
        return found

    @property
    def memory(self) -> dict[str, RowMemory]:
        """Maps each table larger than memory to the prediction of its memory and of its reads from storage."""
        return {d.parameter: d.memory for d in self.decisions if d.memory is not None}

    @property
    def rows_as(self) -> Format:
        """The format in which rows of sharded tables are sent, such as "bf16"; "exact" if they are not rounded."""
        return next(
            (d.travels_as for d in self.decisions if d.strategy in SHARDED and d.travels_as != "exact"), "exact"
        )

    @property
    def row_exchanges(self) -> dict[str, tuple[str, ...]]:
        """Maps the name of each exchange of table rows to the names of the tables that it exchanges. The name is that
        of a sharded table or of a joined table.
        """
        of = {table: space for space in self.spaces for table in space.tables}
        found: dict[str, tuple[str, ...]] = {}
        for table in filter(lambda name: self[name].is_table, self.sharded):
            space = of.get(table)
            found |= {table: (table,)} if space is None else {space.name: space.tables}
        return found

    @property
    def exchanged(self) -> tuple[str, ...]:
        """Names of the replicated parameters whose gradients have a sparse exchange."""
        return tuple(d.parameter for d in self.decisions if d.strategy in EXCHANGES)

    @property
    def sparse(self) -> tuple[str, ...]:
        """Names of the unsharded tables whose gradients are sparse (COO) tensors and are not made dense."""
        found = (d.parameter for d in self.decisions if d.sparse and d.strategy not in SHARDED)
        return tuple(name for name in found if not self.makes_dense(name))

    def makes_dense(self, parameter: str) -> bool:
        """Returns whether a sparse (COO) gradient of a parameter is made dense before its exchange, because the
        parameter's strategy does not send single rows.
        """
        return any(parameter in bucket for bucket in self.buckets) and self[parameter].strategy not in BY_ROWS

    @property
    def sent_bytes_per_step(self) -> int:
        """The predicted bytes that one rank sends per step, averaged over ranks."""
        return sum(d.sent_bytes_per_step for d in self.decisions)

    @cached_property
    def _by_parameter(self) -> dict[str, Decision]:
        """Maps each parameter to its decision."""
        return {decision.parameter: decision for decision in self.decisions}

    def __getitem__(self, parameter: str) -> Decision:
        if (found := self._by_parameter.get(parameter)) is None:
            raise KeyError(f"The plan has no parameter {parameter!r}. Its parameters are {[*self._by_parameter]}.")
        return found

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def join_tables(self, tables: Sequence[str]) -> JoinedTable:
        """Returns the joined table that stacks the rows of these tables in this order."""
        decisions = {name: self[name] for name in tables}
        return JoinedTable.from_tables(
            {name: each.shape[0] for name, each in decisions.items()},
            {name: each.padding_idx for name, each in decisions.items()},
        )

    def digest(self) -> str:
        """Returns a hash of everything in the plan that ranks must agree on."""
        agreed = [(d.parameter, d.shape, d.strategy, d.scheme, d.grid, d.travels_as) for d in self.decisions]
        everything = (self.world_size, agreed, self.buckets, self.renormed, self.links, self.spaces, self.schedule_name)
        return hashlib.sha256(repr(everything).encode()).hexdigest()

    def explain(self) -> str:
        """Returns a text with all strategies that were compared for each parameter, their predicted costs and the
        reason against each.
        """
        return explain(self)

    def to_dict(self) -> dict[str, object]:
        """Returns the plan as nested dicts and tuples, by the names of its fields."""
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, for `compile(plan=path)`."""
        write_json(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Loads a plan that `save` has written.

        Raises:
            ValueError: the file is missing or contains no plan.
        """
        try:
            return read_json(cls, path)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"{path} is not a plan written by plan.save(path): {error}. Save it again from a model that has been "
                "called."
            ) from error

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        """Returns the plan as HTML, for notebooks."""
        return preformatted(str(self))


def check_grid(grid: Grid, parameter: str, shape: tuple[int, ...], world_size: int) -> None:
    """Raises `ValueError` if a table cannot be sharded on a grid of ranks that the user requested.

    Args:
        parameter, shape: the table's name and (rows, columns).
    """
    num_rows, columns = shape
    if grid.rows < 1 or grid.rows * grid.columns != world_size or grid.columns > columns or not grid.takes(num_rows):
        raise ValueError(
            f"strategy: Grid({grid.rows}, {grid.columns}) does not fit {parameter}. rows * columns must be "
            f"{world_size}, the number of ranks. The table allows at most {columns} columns, and torch.chunk must be "
            f"able to split {num_rows} rows into `rows` chunks. Pass another Grid, or pass 'alltoall' to choose one "
            "automatically."
        )
