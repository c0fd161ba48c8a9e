"""Decides the strategy of every parameter and the buckets. Deciding only: the passes apply what the plan says.

Contract
    A pure function of the captured graph, the first batches' rows on all ranks, the optimizer's blockers and the
    cluster: one rank computes the plan, the others receive it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

from embrace_fx import cost
from embrace_fx.exchange_cost import Scheme, cheaper_scheme, cheapest_block, predict
from embrace_fx.graph import Table, TrainingGraph
from embrace_fx.passes.asked_strategies import Strategy, requested_strategies
from embrace_fx.passes.bucketing import plan_buckets
from embrace_fx.passes.narrow import exchange_dtype
from embrace_fx.passes.shard_cost import (
    FEWEST_RANKS,
    RowsAtHome,
    replica_work,
    shard_exchange,
    shard_work,
    widest_useful,
)
from embrace_fx.passes.stacking import Stackable, plan_stacks
from embrace_fx.plan import EXCHANGES, Candidate, Decision, Grid, Plan, check_grid
from embrace_fx.sparsity import Sparsity, in_blocks, independent

CLEARLY = 0.8
"""Of the predicted time of the strategy in use: what another one must stay below for a table to change. And of a legal
AlltoAll's: what a sparse exchange of replicas must stay below, which needs the whole table on every rank."""

SHARES = (1e-3, 0.01, 0.05, 0.25, 1.0)
"""Of a table's rows, read by each rank: at these it is tried out whether its strategy depends on them."""


@dataclass(frozen=True)
class ParameterFacts:
    """What the planner needs to know of a parameter beyond the graph."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    used: bool  # by the first batch of any rank
    row_update_blocker: str | None
    updated_by_rows: bool  # whatever the strategy: the user asked for SparseAdam, or for lazy updates
    param_group: int = 0  # which one holds it, of all optimizers'

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class _Priced:
    """A strategy with its price.

    Attributes:
        alone_ms: what it adds to a step: without start-ups where those are shared, of an AllReduce with its bucket and
            of an AlltoAll with all tables.
        blocker: why it is not legal, or None.
    """

    strategy: str
    exchange: cost.Exchange
    predicted_ms: float
    alone_ms: float
    memory_bytes: int
    scheme: str = ""
    blocker: str | None = None
    grid: Grid | None = None


@dataclass(frozen=True)
class _Choice:
    """A strategy out of several, with the reason in one line."""

    chosen: _Priced
    reason: str
    candidates: tuple[Candidate, ...] = ()


def decide(  # noqa: PLR0913
    graph: TrainingGraph,
    facts: tuple[ParameterFacts, ...],
    rows_by_rank: Mapping[str, tuple[int, ...]],
    *,
    world_size: int,
    strategy: Strategy = "auto",
    cluster: cost.Cluster = cost.Cluster(),
    sparsity: Mapping[str, Sparsity] | None = None,
    rows_at_home: Mapping[str, RowsAtHome] | None = None,
    current: Plan | None = None,
) -> Plan:
    """The plan for a graph.

    Args:
        graph: the captured graph with its tables found.
        facts: every parameter of the model.
        rows_by_rank: table -> unique rows that each rank's first batch reads.
        strategy: "auto", one strategy or grid for every table, or {name pattern: strategy or grid}.
        cluster: the links that strategies are compared on, and buckets and blocks cut for.
        sparsity: table -> how its gradients lie on all ranks, in rows; of others it is assumed, rows being drawn at
            random as often as `rows_by_rank` says.
        rows_at_home: table -> which of each rank's rows its own row of a grid has; of others, the share that falls
            there at random.
        current: the plan in use: a table's strategy stays unless the best one takes less than `CLEARLY` of its time,
            and shards stay as they lie.

    Raises:
        ValueError: a strategy that does not exist, a pattern that nothing matches, or a grid of other ranks.
    """
    in_use = {d.parameter: d for d in current} if current is not None else {}
    links = cluster.among(world_size)
    setting = _Setting(graph, world_size, links, cluster, sparsity or {}, rows_at_home or {}, in_use)
    tables = {table.parameter: table for table in graph.tables}
    wanted = requested_strategies(strategy, tuple(tables), tuple(fact.name for fact in facts if fact.trainable))
    decisions, watched = [], []
    for fact in facts:
        if not fact.trainable:
            choice = _Choice(_nothing_sent("frozen"), "takes no gradient")
        elif not fact.used:
            choice = _Choice(_nothing_sent("unused"), "no rank's forward gives it a gradient")
        elif fact.name in tables:
            choice = setting.of_table(tables[fact.name], fact, rows_by_rank.get(fact.name, ()), wanted[fact.name])
            if wanted[fact.name] == "auto" and setting.depends_on_rows(tables[fact.name], fact):
                watched.append(fact.name)
        else:
            choice = setting.of_dense(fact, wanted[fact.name])
        chosen = choice.chosen
        decisions.append(
            Decision(
                fact.name,
                fact.shape,
                fact.name in tables,
                chosen.strategy,
                choice.reason,
                chosen.exchange.sent_bytes,
                cost.all_reduce(fact.nbytes, world_size).sent_bytes if fact.trainable else 0,
                chosen.predicted_ms,
                chosen.scheme,
                chosen.grid,
                choice.candidates,
            )
        )
    replicas = {d.parameter: d.strategy for d in decisions if d.strategy in ("allreduce", *EXCHANGES)}
    reduced = set(replicas) if world_size > 1 else set()
    alone = {name for name in reduced if replicas[name] in EXCHANGES}
    sizes = {fact.name: fact.nbytes for fact in facts}
    renormed = tuple(t.parameter for t in graph.tables if t.max_norm and world_size > 1)
    buckets = plan_buckets(graph, reduced, sizes, cluster, world_size, alone)
    stacks = plan_stacks(graph, _by_columns(tables, decisions, facts, world_size))
    return Plan(world_size, tuple(decisions), buckets, renormed, cluster, watched=tuple(watched), stacks=stacks)


def _by_columns(
    tables: Mapping[str, Table], decisions: list[Decision], facts: tuple[ParameterFacts, ...], world_size: int
) -> list[Stackable]:
    """The tables that lie by columns over several ranks."""
    return [
        Stackable(tables[fact.name], fact.param_group, ceil(fact.nbytes / world_size))
        for decision, fact in zip(decisions, facts, strict=True)
        if decision.strategy == "alltoall" and decision.grid is None and world_size > 1
    ]


def shard_blocker(table: Table) -> str | None:
    """Why a table's columns cannot be spread whatever the cost, or None."""
    kinds = {use.kind for use in table.uses}
    paddings = {use.padding_idx for use in table.uses}
    if table.use != "sparse":
        return f"also read densely ({', '.join(table.dense_users[:2])}): its gradient has every row"
    if table.max_norm:
        return "max_norm rescales whole rows at each lookup"
    if "bag:max" in kinds:
        return "an EmbeddingBag in max mode compares whole rows"
    if len(paddings) > 1:
        return f"its lookups disagree on padding_idx ({', '.join(map(str, sorted(paddings)))})"
    if any(use.scale_grad_by_freq for use in table.uses):
        return "scale_grad_by_freq needs every rank's counts of every id"
    if not all(use.ids_from_batch for use in table.uses):
        return "its ids depend on parameters, so they are not known before the forward"
    return None


@dataclass(frozen=True)
class _Setting:
    """What every parameter's choice is made in; `cluster` is `links` as one rank per machine, for times."""

    graph: TrainingGraph
    world_size: int
    cluster: cost.Cluster
    links: cost.Cluster
    sparsity: Mapping[str, Sparsity]
    rows_at_home: Mapping[str, RowsAtHome]
    in_use: Mapping[str, Decision]

    def of_dense(self, fact: ParameterFacts, wanted: str | Grid) -> _Choice:
        """A parameter that no lookup reads: nothing is known of its gradient's zeros, but the user may know."""
        strategies = ("allreduce",) if wanted == "auto" else ("allreduce", *EXCHANGES)
        packed = cost.passes_over(fact.nbytes) + cost.claim(fact.nbytes)  # into its bucket
        priced = self._replicas(fact, _all_rows(fact, self.world_size), cost.Exchange(0, 0), packed, strategies)
        assert isinstance(wanted, str)  # grids are for tables
        if wanted == "auto":
            return _Choice(priced["allreduce"], "dense gradient")
        reason = "asked for" if wanted == "allreduce" else "asked for; predicted for a gradient without zeros"
        return self._chosen(priced, wanted, reason, f"{wanted} was asked for")

    def of_table(self, table: Table, fact: ParameterFacts, rows: tuple[int, ...], wanted: str | Grid) -> _Choice:
        """What is legal comes first, then what was asked for, then what is cheaper."""
        sharded = self._laid_out(table, fact, rows, wanted)
        wanted = "alltoall" if isinstance(wanted, Grid) else wanted
        upkeep = upkeep_of_replicas(table, rows, self.world_size)
        replicas = self._replicas(fact, self._sparsity_of(table, fact, rows), upkeep, replica_work(fact.nbytes))
        priced = replicas | {"alltoall": sharded}
        mean_rows = sum(rows) / max(len(rows), 1)
        share = mean_rows / max(table.num_rows, 1)
        grid = sharded.grid or Grid(1, self.world_size)
        width = f"{-(-table.embedding_dim // grid.columns)} columns per rank"
        read = f"{mean_rows:.0f} of {table.num_rows} rows read ({share:.2%})"
        what = f"{read}, {grid}, {width}" if sharded.grid is not None else f"{read}, {width}"
        blocker = sharded.blocker
        asked = f"{wanted} was asked for"
        if wanted in EXCHANGES:
            return self._chosen(priced, wanted, f"asked for; {read}", asked)
        if wanted == "alltoall":
            if blocker is not None:
                return self._chosen(priced, "allreduce", blocker, "alltoall was asked for")
            return self._chosen(priced, "alltoall", f"asked for; {what}", asked)
        if wanted == "allreduce":
            return self._chosen(priced, "allreduce", blocker or "asked for", asked)
        if blocker is None and fact.updated_by_rows:
            return self._chosen(priced, "alltoall", f"updated by rows; {what}", "it is updated by rows")
        constant = all(use.constant_ids for use in table.uses)
        if blocker is None and constant:
            return self._chosen(priced, "allreduce", "its ids do not depend on the batch", "its ids never change")
        if self.world_size == 1:
            cheaper = blocker is None and share < 0.5
        else:
            cheaper = blocker is None and sharded.predicted_ms < priced["allreduce"].predicted_ms
        best = self._sparsely(priced) or ("alltoall" if cheaper else "allreduce")
        in_use = self.in_use[fact.name].strategy if fact.name in self.in_use else best
        if best != in_use and not self._worth_a_change(priced[in_use], priced[best]):
            return self._chosen(priced, in_use, f"in use; {what}", f"{in_use} is in use, {best} not clearly faster")
        if best in EXCHANGES:
            return self._chosen(priced, best, f"{blocker}; {read}" if blocker else read)
        if best == "alltoall":
            return self._chosen(priced, "alltoall", what)
        return self._chosen(priced, "allreduce", blocker or f"small, or densely read: {what}")

    def depends_on_rows(self, table: Table, fact: ParameterFacts) -> bool:
        """Whether more or fewer rows read would make another strategy the best."""
        anywhere = replace(self, sparsity={}, in_use={})
        rows = {ceil(table.num_rows * share) for share in SHARES}
        choices = (anywhere.of_table(table, fact, (each,) * self.world_size, "auto") for each in rows)
        return self.world_size > 1 and len({choice.chosen.strategy for choice in choices}) > 1

    @staticmethod
    def _worth_a_change(in_use: _Priced, best: _Priced) -> bool:
        return in_use.blocker is not None or best.predicted_ms < CLEARLY * in_use.predicted_ms

    def _replicas(
        self,
        fact: ParameterFacts,
        rows: Sparsity,
        upkeep: cost.Exchange,
        around: cost.Work,
        strategies: Collection[str] = ("allreduce", *EXCHANGES),
    ) -> dict[str, _Priced]:
        """Strategies of replicas, and the `upkeep` and the work `around` the exchange that all of them need."""
        priced = {}
        for strategy in strategies:
            scheme: Scheme = cheaper_scheme(rows, self.cluster) if strategy == "zen" else "balanced"
            found = predict(strategy, self._units(rows, strategy), scheme=scheme, cluster=self.links)
            held = 0 if strategy == "allreduce" else 2 * found.mean.sent_bytes
            others_ms = around.time_ms(self.cluster) + upkeep.time_ms(self.cluster, "all_reduce")
            alone = replace(found, critical=replace(found.critical, messages=0)) if strategy == "allreduce" else found
            priced[strategy] = self._priced(
                strategy,
                found.mean + upkeep,
                found.time_ms(self.cluster) + others_ms,
                alone.time_ms(self.cluster) + others_ms,
                2 * fact.nbytes + held,
                scheme if strategy == "zen" else "",
            )
        return priced

    def _laid_out(self, table: Table, fact: ParameterFacts, rows: tuple[int, ...], wanted: str | Grid) -> _Priced:
        """Shards as asked for, or as they lie; else by columns, or on a grid where that is clearly faster.

        Bytes are the same. But by columns a rank handles a piece of every row that any rank reads, N u pieces of D / N
        columns with u rows of each rank; on a grid of R rows those of its own row of ranks, N u / R of D / C
        (`shard_work`). Of the grids with useful columns it is the one with most columns: they share the work evenly
        whatever the ids, rows only as far as ids are spread.
        """
        if isinstance(wanted, Grid):
            check_grid(wanted, fact.name, fact.shape, self.world_size)
            return self._sharded(table, fact, rows, wanted)
        used = self.in_use.get(fact.name)
        if used is not None and used.strategy == "alltoall":
            return self._sharded(table, fact, rows, used.grid)
        by_columns = self._sharded(table, fact, rows, None)
        grid = widest_useful(table, self.world_size)
        if self.world_size < FEWEST_RANKS or grid.rows == 1 or table.num_rows < grid.rows**2:
            return by_columns
        on_grid = self._sharded(table, fact, rows, grid)
        return on_grid if on_grid.predicted_ms < CLEARLY * by_columns.predicted_ms else by_columns

    def _sharded(self, table: Table, fact: ParameterFacts, rows: tuple[int, ...], grid: Grid | None) -> _Priced:
        """Shards on a grid; None, or one row: by columns."""
        grid = grid if grid is not None and grid.rows > 1 else None
        itemsize = exchange_dtype(self.graph, table).itemsize
        at_home = self.rows_at_home.get(fact.name, {}).get(grid.rows) if grid is not None else None
        exchange = shard_exchange(table, rows, itemsize, self.world_size, grid, at_home)
        work_ms = shard_work(table, rows, itemsize, self.world_size, grid).time_ms(self.cluster)
        return self._priced(
            "alltoall",
            exchange,
            exchange.time_ms(self.cluster, "all_to_all") + work_ms,
            replace(exchange, messages=0).time_ms(self.cluster, "all_to_all") + work_ms,
            fact.nbytes // self.world_size + 2 * exchange.sent_bytes,
            blocker=shard_blocker(table) or fact.row_update_blocker,
            grid=grid,
        )

    def _priced(
        self,
        strategy: str,
        exchange: cost.Exchange,
        predicted_ms: float,
        alone_ms: float,
        memory_bytes: int,
        scheme: str = "",
        blocker: str | None = None,
        grid: Grid | None = None,
    ) -> _Priced:
        """A single rank exchanges nothing, in no time."""
        times_ms = (predicted_ms, alone_ms) if self.world_size > 1 else (0.0, 0.0)
        return _Priced(strategy, exchange, *times_ms, memory_bytes, scheme, blocker, grid)

    def _sparsity_of(self, table: Table, fact: ParameterFacts, rows: tuple[int, ...]) -> Sparsity:
        """Of a table's gradient in rows; dense where it is, or where ids are only known in the forward."""
        if table.use != "sparse" or not rows or not all(use.ids_from_batch for use in table.uses):
            return _all_rows(fact, self.world_size)
        assumed = independent(table.num_rows, table.embedding_dim, fact.itemsize, rows)
        return self.sparsity.get(table.parameter, assumed)

    def _units(self, rows: Sparsity, strategy: str) -> Sparsity:
        if strategy != "omnireduce":
            return rows
        return in_blocks(rows, cheapest_block(rows.width, rows.itemsize, self.links))

    def _sparsely(self, priced: Mapping[str, _Priced]) -> str | None:
        """The cheapest sparse exchange of replicas, if AllReduce adds more to a step and AlltoAll clearly more."""
        if self.world_size == 1:
            return None
        cheapest = min((priced[name] for name in EXCHANGES), key=lambda each: each.predicted_ms)
        others = [p for p in priced.values() if p.strategy not in EXCHANGES and p.blocker is None]
        limits_ms = (each.alone_ms * (CLEARLY if each.strategy == "alltoall" else 1.0) for each in others)
        return cheapest.strategy if cheapest.alone_ms < min(limits_ms) else None

    def _chosen(self, priced: Mapping[str, _Priced], name: str, reason: str, against: str = "") -> _Choice:
        """The choice with what spoke against the others: `against`, where it was not the time."""
        chosen = priced[name]
        if self.world_size == 1:  # nothing is sent, so that there is nothing to weigh
            return _Choice(chosen, reason)
        return _Choice(
            chosen,
            reason,
            tuple(
                Candidate(
                    each.strategy,
                    each.scheme,
                    each.exchange.sent_bytes,
                    each.predicted_ms,
                    each.memory_bytes,
                    "" if each is chosen else each.blocker or against or _slower(each, chosen),
                    each.grid,
                )
                for each in sorted(priced.values(), key=lambda each: each.predicted_ms)
            ),
        )


def _slower(other: _Priced, chosen: _Priced) -> str:
    """Why the time of one speaks for another."""
    ratio = other.predicted_ms / max(chosen.predicted_ms, 1e-9)
    times = f"{ratio:.2f} times the time"
    if ratio > 1 or other.strategy not in EXCHANGES or chosen.strategy in EXCHANGES:
        return times
    if chosen.strategy == "alltoall":
        return f"{times}, but not below {CLEARLY:.0%} without start-ups, and replicas hold every row"
    return f"{times}, but not without the start-ups that {chosen.strategy} shares"


def _nothing_sent(strategy: str) -> _Priced:
    return _Priced(strategy, cost.Exchange(0, 0), 0.0, 0.0, 0)


def _all_rows(fact: ParameterFacts, world_size: int) -> Sparsity:
    """A gradient without zeros."""
    num_rows = fact.shape[0] if fact.shape else 1
    return independent(num_rows, prod(fact.shape[1:]), fact.itemsize, (num_rows,) * world_size)


def upkeep_of_replicas(table: Table, rows_by_rank: tuple[int, ...], world_size: int) -> cost.Exchange:
    """What one rank sends per step, beyond the gradient, so that the replicas of a whole table stay equal."""
    upkeep = cost.Exchange(0, 0)
    if world_size == 1 or not rows_by_rank:
        return upkeep
    if table.max_norm:  # `ShardTables.renormed`: all ranks rescale the rows that any rank reads
        upkeep += cost.gather_ids(rows_by_rank, table.num_rows)
    counted = {name for use in table.uses if use.scale_grad_by_freq for name in use.backward}
    for _ in counted:  # `GlobalFrequency`: a count of int64 per row, for each backward
        upkeep += cost.all_reduce(table.num_rows * 8, world_size)
    return upkeep
