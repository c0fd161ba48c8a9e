"""Prices every possible strategy for a parameter: time, bytes, memory, or the reason why it is not legal.

Contract
    This module only prices; `decide.py` chooses. Existing shards are priced on their grid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod, sqrt

from torch import fx

from embrace_fx.cost import links as cost
from embrace_fx.cost.blocks import fastest_block_size
from embrace_fx.cost.exchanges import Scheme, cheaper_scheme, predict
from embrace_fx.cost.sparsity import Sparsity, in_blocks, independent_ranks, with_units_by_rank
from embrace_fx.cost.wire import Format, Wire
from embrace_fx.passes.heads import Unmatched, find_head, forward_nodes, head_blocker, head_losses
from embrace_fx.passes.narrow import exchange_dtypes
from embrace_fx.passes.node_cost import node_ms
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.passes.planner.step_cost import (
    FEWEST_RANKS,
    ROUNDS,
    LocalRows,
    replay_work,
    replica_work,
    shard_exchange,
    shard_work,
    sweep_work,
    widest_useful_grid,
)
from embrace_fx.vocabulary.exactness import STILL, DenseUpdatePolicy
from embrace_fx.vocabulary.graph import FROM_GRADIENT, TableSpec, TrainingGraph
from embrace_fx.vocabulary.head import HeadPlan
from embrace_fx.vocabulary.plan import BY_ROWS, CANDIDATES, EXCHANGES, SHARDED, Decision, Grid, check_grid
from embrace_fx.vocabulary.row_wise import NOT_ON_A_GRID

CLEARLY = 0.8
"""A change must be predicted to take less than this fraction of the time: of the strategy in use; of a legal AlltoAll,
for a sparse exchange, which needs the whole table on every rank; of columns, for a grid."""

INDEX_BYTES = 8
"""Bytes of a unit in the index sets of Zen (`embrace_fx.runtime.exchanges.hashing.index_sets`)."""

HEAD_EXCHANGES = 3
"""Exchanges of an output layer per step: counts, labels and coefficients."""

CHUNK_EXCHANGES = 3
"""Exchanges of an output layer per chunk: hidden states, statistics and hidden gradients."""

MOST_CHUNKS = 8
"""Maximum chunks of an output layer: then 1/8 of the logits are in memory, and 1/8 of a transfer is exposed."""

RESIDUAL_BYTES = 4
"""Bytes of an element in the rounding residual (`embrace_fx.runtime.ranks.wire_rounding`)."""


@dataclass(frozen=True)
class ParameterFacts:
    """Facts about a parameter that the planner needs and that the captured graph does not contain."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    used: bool  # whether any rank's first batch uses the parameter
    row_update_blocker: str | None
    param_group: int = 0  # the index of its param group among those of all optimizers
    dense_update_policy: DenseUpdatePolicy = ""
    local: bool = False  # whether ranks do not synchronize the parameter
    adds_up_norms: bool = False  # whether its optimizer needs the sum of a row's squares over all ranks
    tied: tuple[str, ...] = ()  # other names of the parameter in the model

    @property
    def nbytes(self) -> int:
        """The bytes of the whole parameter."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Findings:
    """All information from which a plan is decided, except the links. Rank 0 builds it from the reports of all ranks.

    Attributes:
        graph: the captured graph, with its tables.
        facts: every parameter of the model.
        rows: table -> how many unique rows each rank's first batch reads.
        strategy: "auto", one strategy or grid for every table, or {name pattern: strategy or grid}.
        schedule: the schedule of the steps.
        sparsity: table -> measured sparsity of its gradients on all ranks, in rows. Other tables are assumed to be read
            at random.
        local_rows: maps a table, then a number of grid rows, to how many of the rows that each rank reads are stored in
            the rank's own row of the grid. If missing, an even share is assumed.
        travels_as: the dtype in which rows of sharded tables and AllReduced gradients are sent.
        has_budget: whether the user has set a memory budget.
        scored: weight of an output layer -> how many positions of each rank's batch have a label; all if missing.
    """

    graph: TrainingGraph
    facts: tuple[ParameterFacts, ...]
    rows: Mapping[str, tuple[int, ...]]
    world_size: int
    strategy: Strategy = "auto"
    schedule: str = "2d"
    sparsity: Mapping[str, Sparsity] = field(default_factory=dict)
    local_rows: Mapping[str, LocalRows] = field(default_factory=dict)
    travels_as: Format = "exact"
    has_budget: bool = False
    scored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def sent_itemsizes(self) -> dict[str, int]:
        """The bytes of an element in which the rows of each table are exchanged if it is sharded."""
        return {name: dtype.itemsize for name, dtype in exchange_dtypes(self.graph).items()}

    def with_whole(self, names: Collection[str], reason: str) -> Findings:
        """Returns a copy that marks tables as unshardable. `reason` says why, for example because of the optimizer."""
        facts = (replace(f, row_update_blocker=reason) if f.name in names else f for f in self.facts)
        return replace(self, facts=tuple(facts))

    def with_rows(self, rows: Mapping[str, tuple[int, ...]]) -> Findings:
        """Returns a copy of the findings with other row counts for some tables."""
        lying = {
            name: with_units_by_rank(found, rows[name]) if name in rows else found
            for name, found in self.sparsity.items()
        }
        local_rows = {name: found for name, found in self.local_rows.items() if name not in rows}
        return replace(self, rows={**self.rows, **rows}, sparsity=lying, local_rows=local_rows)


@dataclass(frozen=True)
class PricedStrategy:
    """A strategy with its predicted cost, or the reason why it is not legal.

    Attributes:
        predicted_ms: the time that the strategy adds to a step that exchanges nothing else.
        sharing_ms: the time that it adds if it shares the latency of its launch with other gradients in a bucket
            (AllReduce) or with joined tables (AlltoAll).
        blocker: why the strategy is not legal, or None.
        defers_rows: whether shards update rows without a gradient only when they are next read.
        norm_bytes: bytes sent to sum squares of rows over ranks, for row-wise optimizers.
        head: how an output layer exchanges hidden states and gradients, or None.
        travels_as: the dtype in which values are sent.
    """

    strategy: str
    exchange: cost.Exchange
    predicted_ms: float
    sharing_ms: float
    memory_bytes: int
    scheme: str = ""
    blocker: str | None = None
    grid: Grid | None = None
    defers_rows: bool = False
    norm_bytes: int = 0
    head: HeadPlan | None = None
    travels_as: Format = "exact"

    @property
    def start_ups_ms(self) -> float:
        """The milliseconds of latency that are saved if this exchange shares a launch with others."""
        return self.predicted_ms - self.sharing_ms

    @property
    def added_ms(self) -> float:
        """The milliseconds that this strategy adds to a step. An unsharded parameter shares the latency of a bucket."""
        return self.predicted_ms if self.strategy in SHARDED else self.sharing_ms


@dataclass(frozen=True)
class Pricing:
    """Prices the strategies of parameters, from the speed of the links and the sizes of what ranks send.

    Attributes:
        in_use: parameter -> its decision in the current plan.
    """

    findings: Findings
    links: cost.Cluster
    in_use: Mapping[str, Decision]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.findings.world_size

    @cached_property
    def cluster(self) -> cost.Cluster:
        """The links, as an equivalent cluster with one rank per machine."""
        return self.links.flattened(self.world_size)

    @cached_property
    def losses(self) -> Collection[str]:
        """The names of the weights of output layers whose loss is in the graph."""
        return head_losses(self.findings.graph)

    @cached_property
    def _forward(self) -> set[fx.Node]:
        """The nodes that belong to the graph's forward."""
        return forward_nodes(self.findings.graph)

    def price_table(
        self, table: TableSpec, fact: ParameterFacts, rows: tuple[int, ...], wanted: str | Grid = "auto"
    ) -> dict[str, PricedStrategy]:
        """Returns the price of each strategy for a table: its candidates, the requested strategy and the one in use.

        Args:
            rows: how many unique rows each rank reads in a step.
            wanted: the strategy or grid that the user requested.
        """
        upkeep = upkeep_of_replicas(table, rows)
        used = self.in_use[fact.name].strategy if fact.name in self.in_use else wanted
        weighed = [each for each in ("allreduce", *EXCHANGES) if each in (*CANDIDATES, wanted, used)]
        sparsity = self._sparsity_of(table, fact, rows)
        replicas = self._price_replicas(fact, sparsity, upkeep, replica_work(fact.nbytes), weighed)
        if table.has_sparse_gradient and self.world_size > 1:
            replicas |= {
                name: replace(each, blocker="its gradient is sparse")
                for name, each in replicas.items()
                if name not in BY_ROWS
            }
        shards = {"alltoall": self._price_shards(table, fact, rows, wanted)}
        if table.use != "sparse" or used == "vocabulary":
            shards["vocabulary"] = self._price_head(fact, table, rows)
        return replicas | shards

    def price_dense(self, fact: ParameterFacts, strategies: Collection[str]) -> dict[str, PricedStrategy]:
        """Returns the price of each of `strategies` for a parameter that no lookup reads. Its gradient is assumed to
        have no zeros.
        """
        packing_bucket = cost.passes_work(fact.nbytes) + cost.new_memory_work(fact.nbytes)
        replicas = [each for each in strategies if each != "vocabulary"]
        dense = _dense_sparsity(fact, self.world_size)
        priced = self._price_replicas(fact, dense, cost.Exchange(0, 0), packing_bucket, replicas)
        if "vocabulary" in strategies:
            priced["vocabulary"] = self._price_head(fact)
        return priced

    def _price_head(
        self, fact: ParameterFacts, table: TableSpec | None = None, rows: tuple[int, ...] = ()
    ) -> PricedStrategy:
        """Returns the price of sharding the rows of an output layer's weight. If lookups also read the weight, `table`
        describes them, and `rows` are the numbers of unique rows that each rank reads.

        Hidden states of positions with a label are sent to every rank, and their gradients are sent back. Each rank
        computes as many logits as without shards.
        """
        grid = Grid(self.world_size, 1)
        both_ways, (of_head, head, hidden_ms) = cost.Exchange(0, 0), self._position_exchanges(fact)
        exchanges = HEAD_EXCHANGES + CHUNK_EXCHANGES * head.chunks
        work = sweep_work(fact.nbytes, self.world_size) + cost.Work(rounds=ROUNDS * exchanges)
        if table is not None:
            wire = Wire(self.findings.sent_itemsizes[table.parameter])
            local = self.findings.local_rows.get(fact.name, {}).get(grid.rows)
            both_ways = shard_exchange(table, rows, wire, grid, local, "none")
            work += shard_work(table, rows, wire.itemsize, grid, "none")
        awaited_ms = both_ways.time_ms(self.cluster, "all_to_all") + of_head.time_ms(self.cluster, "all_to_all")
        times = self._exchange_ms(*[awaited_ms - hidden_ms + work.time_ms(self.cluster)] * 2)
        memory = fact.nbytes // self.world_size + 2 * (both_ways + of_head).sent_bytes
        return PricedStrategy(
            "vocabulary",
            both_ways + of_head,
            *times,
            memory,
            blocker=self._head_blocker(fact),
            grid=grid,
            head=head,
        )

    def _position_exchanges(self, fact: ParameterFacts) -> tuple[cost.Exchange, HeadPlan, float]:
        """Returns (the exchanges of an output layer's hidden states and gradients per step, their division into chunks,
        the milliseconds of these exchanges that compute hides).

        With K chunks, hidden states are sent while the logits of other chunks are computed. This hides all but 1 / K of
        the shorter of these two times. Each chunk takes three exchanges. K minimizes the total.
        """
        try:
            head = find_head(self.findings.graph, fact.name, self._forward)
        except Unmatched:
            return cost.Exchange(0, 0), HeadPlan(), 0.0
        hidden, expected = head.hidden.meta["val"], self.findings.graph.expected
        every, others = expected.number(hidden.shape[0]), self.world_size - 1
        scored = self.findings.scored.get(fact.name, ())
        positions = round(sum(scored) / len(scored)) if scored else every
        width, rounds = hidden.shape[1] * hidden.element_size(), cost.Work(rounds=ROUNDS * CHUNK_EXCHANGES)
        gathering = cost.Exchange(positions * width * others, 0)
        product_ms = node_ms(head.product, self.links.compute, expected) * positions / max(every, 1)
        both_ms = gathering.time_ms(self.cluster, "all_to_all"), product_ms
        starting = cost.Exchange(0, CHUNK_EXCHANGES * others)
        start_ms = starting.time_ms(self.cluster, "all_to_all") + rounds.time_ms(self.cluster)
        chunks = min(max(round(sqrt(min(both_ms) / start_ms)) if start_ms else 1, 1), MOST_CHUNKS, max(positions, 1))
        if self.findings.has_budget:
            chunks = MOST_CHUNKS
        position_bytes = 2 * width + 5 * fact.itemsize + INDEX_BYTES
        messages = HEAD_EXCHANGES + CHUNK_EXCHANGES * chunks
        sent = cost.Exchange(positions * position_bytes * others, messages * others)
        plan = HeadPlan(chunks, positions / max(every, 1), sent.sent_bytes)
        return sent, plan, min(both_ms) * (1 - 1 / chunks)

    def _head_blocker(self, fact: ParameterFacts) -> str | None:
        """Returns the reason why the output layer with this weight cannot be sharded, or None if it can."""
        if self.world_size == 1:
            return "a single rank holds the whole layer"
        if not Grid(self.world_size, 1).takes(fact.shape[0]):
            return f"{self.world_size} ranks cannot share its {fact.shape[0]} rows evenly"
        if self.findings.travels_as != "exact":
            return f"hidden states are not sent as {self.findings.travels_as}"
        norms = NOT_ON_A_GRID if fact.adds_up_norms else None
        return head_sharding_blocker(self.findings.graph, fact.name, self._forward) or fact.row_update_blocker or norms

    def _price_replicas(
        self,
        fact: ParameterFacts,
        rows: Sparsity,
        upkeep: cost.Exchange,
        around: cost.Work,
        strategies: Collection[str],
    ) -> dict[str, PricedStrategy]:
        """Returns the price of each strategy that keeps a table whole on every rank.

        Args:
            rows: the sparsity of the table's gradient, in rows.
            upkeep: what ranks send besides the gradient to keep the replicas equal.
            around: the processor work of a step besides the exchange.
        """
        priced = {}
        wire = Wire(fact.itemsize, self.findings.travels_as)
        for strategy in strategies:
            scheme: Scheme = cheaper_scheme(rows, self.cluster) if strategy == "zen" else "balanced"
            units = rows
            if strategy == "omnireduce":
                units = in_blocks(rows, fastest_block_size(rows.width, rows.itemsize, self.links))
            found = predict(strategy, units, scheme=scheme, cluster=self.links)
            if rounds := strategy == "allreduce" and wire.is_narrower:
                narrow = cost.all_reduce(wire.dense_bytes(prod(fact.shape)), self.world_size)
                found = replace(found, mean=narrow, critical=narrow)
            held = 0 if strategy == "allreduce" else 2 * found.mean.sent_bytes
            if strategy == "zen" and scheme == "balanced":
                held += INDEX_BYTES * rows.num_units  # the index sets of all servers, which are kept between steps
            others_ms = around.time_ms(self.cluster) + upkeep.time_ms(self.cluster, "all_reduce")
            shared = replace(found, critical=replace(found.critical, messages=0)) if strategy == "allreduce" else found
            if rounds:  # count the rounding errors of the rank's own gradient and of its reduced share
                held += RESIDUAL_BYTES * prod(fact.shape) * (self.world_size + 1) // self.world_size
            priced[strategy] = PricedStrategy(
                strategy,
                found.mean + upkeep,
                *self._exchange_ms(found.time_ms(self.cluster) + others_ms, shared.time_ms(self.cluster) + others_ms),
                2 * fact.nbytes + held,
                scheme if strategy == "zen" else "",
                travels_as=self.findings.travels_as if rounds else "exact",
            )
        return priced

    def _price_shards(
        self, table: TableSpec, fact: ParameterFacts, rows: tuple[int, ...], requested: str | Grid
    ) -> PricedStrategy:
        """Returns the price of sharding a table: on the requested grid, else on the current one, else by columns or on
        a grid that is clearly faster.

        Both layouts send the same bytes. If each of N ranks reads u rows of D values, a rank that owns D / N columns
        handles N u pieces of D / N values. On a grid of R x C ranks, it handles N u / R pieces of D / C values. Of the
        grids with useful columns, the one with the most columns is priced, because columns divide the work evenly for
        any ids, but rows do so only if the ids are spread evenly.
        """
        if isinstance(requested, Grid):
            check_grid(requested, fact.name, fact.shape, self.world_size)
            return self._price_layout(table, fact, rows, requested)
        used = self.in_use.get(fact.name)
        if used is not None and used.strategy == "alltoall":
            return self._price_layout(table, fact, rows, used.grid)
        by_columns = self._price_layout(table, fact, rows, None)
        grid = widest_useful_grid(table, self.world_size)
        if fact.adds_up_norms or self.world_size < FEWEST_RANKS or grid.rows == 1 or table.num_rows < grid.rows**2:
            return by_columns
        on_grid = self._price_layout(table, fact, rows, grid)
        return on_grid if on_grid.predicted_ms < CLEARLY * by_columns.predicted_ms else by_columns

    def _price_layout(
        self, table: TableSpec, fact: ParameterFacts, rows: tuple[int, ...], grid: Grid | None
    ) -> PricedStrategy:
        """Returns the price of sharding a table on a grid, or by columns if the grid is None or has one row."""
        grid = grid if grid is not None and grid.rows > 1 else None
        itemsize = self.findings.sent_itemsizes[table.parameter]
        local_rows = self.findings.local_rows.get(fact.name, {}).get(grid.rows) if grid is not None else None
        wire = Wire(itemsize, self.findings.travels_as)
        exchange = shard_exchange(table, rows, wire, grid, local_rows, self.findings.schedule)
        norms = self._price_norms(table, fact, rows)
        exchange += norms
        defers_rows, update_work = self._update_rule_cost(table, fact, rows)
        work = shard_work(table, rows, itemsize, grid, self.findings.schedule) + update_work
        shared_ms = replace(exchange, messages=0).time_ms(self.cluster, "all_to_all")
        norms_blocker = NOT_ON_A_GRID if fact.adds_up_norms else None
        return PricedStrategy(
            "alltoall",
            exchange,
            *self._exchange_ms(
                exchange.time_ms(self.cluster, "all_to_all") + work.time_ms(self.cluster),
                shared_ms + replace(work, rounds=0.0).time_ms(self.cluster),
            ),
            fact.nbytes // self.world_size + 2 * exchange.sent_bytes,
            blocker=shard_blocker(table) or fact.row_update_blocker or (norms_blocker if grid is not None else None),
            grid=grid,
            defers_rows=defers_rows,
            norm_bytes=norms.sent_bytes,
            travels_as=self.findings.travels_as if wire.is_narrower else "exact",
        )

    def _price_norms(self, table: TableSpec, fact: ParameterFacts, rows: tuple[int, ...]) -> cost.Exchange:
        """Returns the AllReduce by which row-wise optimizers sum one number for each row that any rank reads. It is
        empty for other optimizers.
        """
        if not fact.adds_up_norms or not rows:
            return cost.Exchange(0, 0)
        found = self.findings.sparsity.get(table.parameter)
        together = sum(rows) if found is None else round(found.union)
        return cost.all_reduce(min(together, table.num_rows) * fact.itemsize, self.world_size)

    def _update_rule_cost(
        self, table: TableSpec, fact: ParameterFacts, rows: tuple[int, ...]
    ) -> tuple[bool, cost.Work]:
        """Chooses between updating all rows in each step and deferring updates of unread rows. Returns whether to defer
        them, and the processor work per step of this choice.
        """
        if fact.dense_update_policy in STILL:
            return False, cost.Work()
        sweep = sweep_work(fact.nbytes, self.world_size)
        replay = replay_work(table, rows, fact.itemsize, self.world_size)
        faster = bool(rows) and replay.time_ms(self.cluster) < sweep.time_ms(self.cluster)
        defers_rows = fact.dense_update_policy == "replay" or (fact.dense_update_policy == "either" and faster)
        return defers_rows, replay if defers_rows else sweep

    def _exchange_ms(self, predicted_ms: float, sharing_ms: float) -> tuple[float, float]:
        """Returns the given times, or zeros for a single rank, which sends nothing."""
        return (predicted_ms, sharing_ms) if self.world_size > 1 else (0.0, 0.0)

    def _sparsity_of(self, table: TableSpec, fact: ParameterFacts, rows: tuple[int, ...]) -> Sparsity:
        """Returns the sparsity of a table's gradient, with rows as units. `rows` is the number of unique rows that each
        rank reads in a step. The gradient counts as dense if ops other than lookups read the table, or if the forward
        computes the ids.
        """
        if table.use != "sparse" or not rows or not all(use.ids_from_batch for use in table.uses):
            return _dense_sparsity(fact, self.world_size)
        assumed = independent_ranks(table.num_rows, table.embedding_dim, fact.itemsize, rows)
        return self.findings.sparsity.get(table.parameter, assumed)


def shard_blocker(table: TableSpec) -> str | None:
    """Returns the reason why a table cannot be sharded, or None if it can."""
    kinds, paddings = {use.kind for use in table.uses}, {use.padding_idx for use in table.uses}
    if FROM_GRADIENT in kinds:
        return "the forward runs eagerly"
    if table.use != "sparse":
        return f"also read densely ({', '.join(table.dense_users[:2])}): its gradient has every row"
    if table.max_norm:
        return "max_norm rescales whole rows at each lookup"
    if "bag:max" in kinds:
        return "an EmbeddingBag in max mode compares whole rows"
    if len(paddings) > 1:
        return f"its lookups disagree on padding_idx ({', '.join(map(str, sorted(paddings)))})"
    if any(use.scale_grad_by_freq for use in table.uses):
        return "scale_grad_by_freq divides gradients by counts of ids, which are not sent with rows"
    if any(use.drawn_late for use in table.uses):
        return "its ids are drawn at random after other random numbers of the forward"
    known = all(use.ids_from_batch for use in table.uses)
    return None if known else "its ids depend on parameters or on other ranks, so they are not known before the forward"


def head_sharding_blocker(graph: TrainingGraph, name: str, forward: set[fx.Node] | None = None) -> str | None:
    """Returns the reason why the rows of a table that an output layer reads cannot be sharded, or None if they can.

    Args:
        forward: the result of `heads.forward_nodes`, if known.
    """
    table = next((each for each in graph.tables if each.parameter == name), None)
    of_lookups = shard_blocker(replace(table, dense_users=())) if table is not None else None
    return of_lookups or head_blocker(graph, name, forward)


def free_strategy(strategy: str) -> PricedStrategy:
    """Returns the price of a strategy that sends nothing, which is zero."""
    return PricedStrategy(strategy, cost.Exchange(0, 0), 0.0, 0.0, 0)


def _dense_sparsity(fact: ParameterFacts, world_size: int) -> Sparsity:
    """Returns the sparsity of a parameter's gradient if it has no zeros: every row is present on every rank."""
    num_rows = fact.shape[0] if fact.shape else 1
    return independent_ranks(num_rows, prod(fact.shape[1:]), fact.itemsize, (num_rows,) * world_size)


def upkeep_of_replicas(table: TableSpec, rows_by_rank: tuple[int, ...]) -> cost.Exchange:
    """Returns the AllGather of ids that each step needs to rescale the same rows of all replicas (`max_norm`)."""
    if not rows_by_rank or not table.max_norm:
        return cost.Exchange(0, 0)
    return cost.predict_id_exchange(rows_by_rank, table.num_rows)  # `ShardTables` inserts this AllGather
