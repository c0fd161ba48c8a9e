"""Decides the strategy of every parameter and the buckets. Deciding only: the passes apply what the plan says.

Contract
    A pure function of the captured graph, the first batches' row counts on all ranks, the optimizer's blockers and the
    cluster: one rank computes the plan, the others receive it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from embrace_fx import cost
from embrace_fx.graph import Gradient, Parameter, Table, TrainingGraph
from embrace_fx.ops import own_columns
from embrace_fx.passes.narrow import exchange_dtype
from embrace_fx.plan import STRATEGIES, Decision, Plan

Strategy = str | Mapping[str, str]


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


def decide(
    graph: TrainingGraph,
    facts: tuple[ParameterFacts, ...],
    rows_by_rank: Mapping[str, tuple[int, ...]],
    *,
    world_size: int,
    strategy: Strategy = "auto",
    cluster: cost.Cluster = cost.Cluster(),
    links: cost.Cluster = cost.Cluster(),
) -> Plan:
    """The plan for a graph.

    Args:
        graph: the captured graph with its tables found.
        facts: every parameter of the model.
        rows_by_rank: table -> unique rows that each rank's first batch reads.
        strategy: "auto", one strategy for every table, or {name pattern: strategy}.
        cluster: what strategies are compared on.
        links: what buckets are cut for.

    Raises:
        ValueError: a strategy that does not exist, or a pattern that no table matches.
    """
    tables = {table.parameter: table for table in graph.tables}
    wanted = requested_strategies(strategy, tuple(tables))
    decisions = []
    for fact in facts:
        dense = cost.all_reduce(prod(fact.shape) * fact.itemsize, world_size)
        chosen, reason, exchange = "allreduce", "dense gradient", dense
        if not fact.trainable:
            chosen, reason, exchange = "frozen", "takes no gradient", cost.Exchange(0, 0)
        elif not fact.used:
            chosen, reason, exchange = "unused", "no rank's forward gives it a gradient", cost.Exchange(0, 0)
        elif fact.name in tables:
            rows = rows_by_rank.get(fact.name, ())
            table = tables[fact.name]
            sparse = shard_exchange(table, rows, exchange_dtype(graph, table).itemsize, world_size)
            exchanges = (dense + upkeep_of_replicas(table, rows, world_size), sparse)
            chosen, reason, exchange = _table_strategy(
                table, fact, rows, exchanges, wanted[fact.name], cluster, world_size
            )
        ddp_bytes = dense.sent_bytes if fact.trainable else 0
        decisions.append(
            Decision(
                fact.name,
                fact.shape,
                fact.name in tables,
                chosen,
                reason,
                exchange.sent_bytes,
                ddp_bytes,
                exchange.time_ms(cluster) if world_size > 1 else 0.0,
            )
        )
    reduced = {d.parameter for d in decisions if d.strategy == "allreduce"} if world_size > 1 else set()
    sizes = {fact.name: prod(fact.shape) * fact.itemsize for fact in facts}
    renormed = tuple(t.parameter for t in graph.tables if t.max_norm and world_size > 1)
    return Plan(world_size, tuple(decisions), plan_buckets(graph, reduced, sizes, links, world_size), renormed)


def requested_strategies(strategy: Strategy, tables: tuple[str, ...]) -> dict[str, str]:
    """Table -> the strategy asked for ("auto" where nothing was)."""
    patterns = {"*": strategy} if isinstance(strategy, str) else dict(strategy)
    for pattern, name in patterns.items():
        if name not in (*STRATEGIES, "auto"):
            raise ValueError(
                f"expected strategy to be 'auto' or one of {', '.join(STRATEGIES)} for {pattern!r}, found {name!r}. "
                "Choose one of these, or leave it to 'auto'."
            )
        if not isinstance(strategy, str) and not fnmatch.filter(tables, pattern):
            raise ValueError(
                f"expected the pattern {pattern!r} of strategy to match a table, found none among "
                f"{', '.join(tables) or 'no tables'}. "
                "Use a table's parameter name, or a pattern such as '*.embedding.weight'."
            )
    chosen = dict.fromkeys(tables, "auto")
    for pattern, name in patterns.items():
        chosen.update(dict.fromkeys(fnmatch.filter(tables, pattern), name))
    return chosen


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


def _table_strategy(
    table: Table,
    fact: ParameterFacts,
    rows_by_rank: tuple[int, ...],
    exchanges: tuple[cost.Exchange, cost.Exchange],
    wanted: str,
    cluster: cost.Cluster,
    world_size: int,
) -> tuple[str, str, cost.Exchange]:
    """Strategy, reason and what it sends; `exchanges`: as replicas, as shards."""
    dense, sparse = exchanges
    blocker = shard_blocker(table) or fact.row_update_blocker
    if blocker is not None:
        return "allreduce", blocker, dense
    if wanted == "allreduce":
        return "allreduce", "asked for", dense
    mean_rows = sum(rows_by_rank) / max(len(rows_by_rank), 1)
    share = mean_rows / max(table.num_rows, 1)
    width = -(-table.embedding_dim // world_size)
    what = f"{mean_rows:.0f} of {table.num_rows} rows read ({share:.2%}), {width} columns per rank"
    if wanted == "alltoall":
        return "alltoall", f"asked for; {what}", sparse
    if fact.updated_by_rows:
        return "alltoall", f"updated by rows; {what}", sparse
    if all(use.constant_ids for use in table.uses):
        return "allreduce", "its ids do not depend on the batch", dense
    if world_size == 1:
        cheaper = share < 0.5
    else:
        cheaper = sparse.time_ms(cluster) < dense.time_ms(cluster)
    return ("alltoall", what, sparse) if cheaper else ("allreduce", f"small, or densely read: {what}", dense)


def shard_exchange(table: Table, rows_by_rank: tuple[int, ...], itemsize: int, world_size: int) -> cost.Exchange:
    """Mean over ranks of what one rank sends per step for a sharded table: ids, rows, gradients.

    Args:
        itemsize: bytes of an element on the wire.
    """
    if world_size == 1 or not rows_by_rank:
        return cost.Exchange(0, 0)
    total = cost.Exchange(0, 0)
    for rank, rows in enumerate(rows_by_rank):
        first, last = own_columns(table.embedding_dim, world_size, rank)
        total += cost.all_to_all_rows(rows_by_rank, last - first, itemsize, rank)
        total += cost.all_to_all_gradients(rows, table.embedding_dim - (last - first), itemsize, world_size)
    both_ways = cost.Exchange(round(total.sent_bytes / world_size), 2 * (world_size - 1))
    return both_ways + cost.gather_ids(rows_by_rank, table.num_rows)


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


def plan_buckets(
    graph: TrainingGraph, reduced: set[str], sizes: Mapping[str, int], cluster: cost.Cluster, world_size: int
) -> tuple[tuple[str, ...], ...]:
    """Blocks of consecutive parameters, the last block first: about the order in which the backward yields gradients.

    Parameters are cut in the order in which the forward reads them, so that what is reduced and updated together is
    also needed together. A bucket is of one dtype, and of the size that the cost model wants.
    """
    position = {node: k for k, node in enumerate(graph.graph.nodes)}
    produced = {
        role.of.name: node
        for node, role in graph.outputs()
        if isinstance(role, Gradient)
        and isinstance(role.of, Parameter)
        and role.of.name in reduced
        and node is not None
    }
    read = {
        role.name: min((position[user] for user in node.users), default=len(position))
        for node, role in graph.inputs()
        if isinstance(role, Parameter) and role.name in produced
    }
    limit = cost.bucket_bytes(cluster, world_size, sum(sizes[name] for name in produced)) if produced else 0
    buckets: list[list[str]] = []
    filled, dtype = 0, None
    for name in sorted(produced, key=lambda n: (read[n], n)):
        if not buckets or filled + sizes[name] > limit or produced[name].meta["val"].dtype != dtype:
            buckets.append([])
            filled = 0
        buckets[-1].append(name)
        filled += sizes[name]
        dtype = produced[name].meta["val"].dtype
    elsewhere = tuple(sorted(reduced - set(produced)))  # read by other ranks' first batches only
    return tuple(tuple(bucket) for bucket in reversed(buckets)) + tuple((name,) for name in elsewhere)
