"""Decides each parameter's strategy (how it is distributed) and the buckets. Passes then apply the plan.

Contract
    A pure function of the captured graph, the rows of all ranks' first batches, the optimizer's blockers and the
    cluster. One rank computes the plan and broadcasts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf

from embrace_fx.cost import links as cost
from embrace_fx.passes.planner.asked_strategies import requested_strategies
from embrace_fx.passes.planner.grouping import Joinable, plan_joined_tables, with_buckets
from embrace_fx.passes.planner.pricing import CLEARLY, Findings, ParameterFacts, PricedStrategy, Pricing, free_strategy
from embrace_fx.passes.planner.step_cost import cheapest_schedule, explain_choice, has_compute, step_times
from embrace_fx.vocabulary.graph import TableSpec
from embrace_fx.vocabulary.joined_table import JoinedTable
from embrace_fx.vocabulary.plan import EXCHANGES, SHARDED, STRATEGIES, Candidate, Decision, Grid, LinksAre, Plan
from embrace_fx.vocabulary.schedule import AUTO, FULL, SCHEDULES
from embrace_fx.vocabulary.sizes import RowCounts

SHARES = (1e-3, 0.01, 0.05, 0.25, 1.0)
"""Shares of a table's rows read by each rank, to test whether the strategy depends on the share."""


DENSELY = 0.5
"""Share of a table's rows, read by each rank in every step, at which AllReduce sends about as much as AlltoAll. Below
it the table is sharded unless a whole table is clearly faster, so that small differences between two measurements of
the
links do not change the strategy."""


@dataclass(frozen=True)
class _Choice:
    """The strategy chosen for a parameter, with the reason in one line.

    Attributes:
        priced: maps all compared strategies to their prices. Empty if only one strategy was possible.
        against: why all other strategies were rejected, or "" if their predicted times were longer.
        reason_if_sharded: for an unsharded table that may still be sharded to share latency with other tables, the
            reason to give in this case; otherwise "".
        sparsely_read: whether each rank reads less than the fraction `DENSELY` of the table's rows.
    """

    chosen: PricedStrategy
    reason: str
    priced: Mapping[str, PricedStrategy] = field(default_factory=dict)
    against: str = ""
    reason_if_sharded: str = ""
    sparsely_read: bool = False

    def candidates(self) -> tuple[Candidate, ...]:
        """Returns the compared strategies, fastest first, each with the reason why it was not chosen."""
        return tuple(
            Candidate(
                each.strategy,
                each.scheme,
                each.exchange.sent_bytes,
                each.predicted_ms,
                each.memory_bytes,
                "" if each is self.chosen else each.blocker or self.against or _compare_times(each, self.chosen),
                each.grid,
            )
            for each in sorted(self.priced.values(), key=lambda each: each.predicted_ms)
        )


def decide(
    findings: Findings,
    links: cost.Cluster = cost.Cluster(),
    current: Plan | None = None,
    links_are: LinksAre = "assumed",
) -> Plan:
    """Returns the plan for a graph and the requested schedule. If the schedule is "auto", chooses the schedule with the
    shortest step.

    Chooses the schedule "2d" if there is nothing to compare: one rank, unknown links, or no compute to hide behind. A
    single rank exchanges nothing; its plan only says which tables are updated by rows and which as a whole.

    Args:
        findings: the graph, the facts about its parameters and the rows that all ranks read.
        links: the cluster for which strategies are compared and sizes of buckets and blocks are chosen.
        current: the plan in use. A table keeps its strategy unless the best strategy takes less than `CLEARLY` times as
            long. Shards keep their grid.
        links_are: whether the links were measured, given by the user, or assumed.

    Raises:
        ValueError: a strategy does not exist, a pattern matches nothing, or a grid does not fit the ranks.
    """
    if findings.world_size == 1:
        name = FULL if findings.schedule == AUTO else findings.schedule
        return _without_exchanges(_decide_for_schedule(replace(findings, schedule=name), links, current, links_are))
    if findings.schedule != AUTO:
        return _decide_for_schedule(findings, links, current, links_are)
    if links_are == "assumed" or not has_compute(findings.graph):
        return _decide_for_schedule(replace(findings, schedule=FULL), links, current, links_are)
    weighed: dict[str, Plan] = {
        name: _decide_for_schedule(replace(findings, schedule=name), links, current, links_are)
        for name in reversed(SCHEDULES)
    }
    price = step_times(findings.graph, weighed)
    best = cheapest_schedule(price, None if current is None else current.schedule_name)
    return replace(weighed[best], chosen_because=explain_choice(price, best))


def _without_exchanges(plan: Plan) -> Plan:
    """Returns a copy of the plan for a single rank, which exchanges nothing: without prices of other strategies,
    rounding of sent values, rescaling by all ranks' ids, and joined tables.
    """
    decisions = tuple(replace(each, candidates=(), travels_as="exact") for each in plan)
    return replace(plan, decisions=decisions, renormed=(), watched=(), spaces=())


def _decide_for_schedule(findings: Findings, links: cost.Cluster, current: Plan | None, links_are: LinksAre) -> Plan:
    """Returns the plan for the schedule that `findings` names.

    Args:
        findings, links, current, links_are: as for `decide`.
    """
    graph, facts, world_size = findings.graph, findings.facts, findings.world_size
    exchanged = (d for d in current if d.strategy in STRATEGIES) if current is not None else ()
    in_use = {decision.parameter: decision for decision in exchanged}
    tables = {table.parameter: table for table in graph.tables}
    pricing = Pricing(findings, links, in_use)
    trainable = tuple(fact.name for fact in facts if fact.trainable)
    tied = {other: fact.name for fact in facts for other in fact.tied}
    wanted = requested_strategies(findings.strategy, tuple(tables), trainable, tied)
    choices = {fact.name: _choose_strategy(pricing, fact, tables.get(fact.name), wanted) for fact in facts}
    auto_tables = {
        fact.name: (tables[fact.name], fact)
        for fact in facts
        if fact.name in tables and fact.trainable and fact.used and not fact.local and wanted[fact.name] == "auto"
    }
    watched = _watched_tables(pricing, auto_tables)
    choices |= _sharded_to_share_latency(choices, pricing)
    decisions = tuple(_record_decision(fact, choices[fact.name], tables.get(fact.name), pricing) for fact in facts)
    whole = (t.parameter for t in graph.tables if t.max_norm)
    renormed = tuple(name for name in whole if choices[name].chosen.strategy != "local")
    spaces = _join_tables(findings, [fact for fact in facts if _is_by_columns(choices[fact.name])])
    plan = Plan(world_size, decisions, (), renormed, links, links_are, watched=watched, spaces=spaces)
    return with_buckets(replace(plan, schedule_name=findings.schedule), graph)


def _choose_strategy(
    pricing: Pricing,
    fact: ParameterFacts,
    table: TableSpec | None,
    wanted: Mapping[str, str | Grid],
) -> _Choice:
    """Chooses a parameter's strategy, independently of other parameters.

    Args:
        pricing: prices the strategies.
        fact: the facts about the parameter.
        table: the parameter as a table, or None if no lookup reads it.
        wanted: maps each parameter to the strategy or grid that the user requested.
    """
    if not fact.trainable:
        return _Choice(free_strategy("frozen"), "takes no gradient")
    if fact.local:
        return _Choice(free_strategy("local"), "ignored as with DDP: each rank has its own")
    if not fact.used:
        return _Choice(free_strategy("unused"), "no rank's forward gives it a gradient")
    if table is None:
        return _choose_for_dense(pricing, fact, wanted[fact.name])
    return _choose_for_table(pricing, table, fact, pricing.findings.rows.get(fact.name, ()), wanted[fact.name])


def _record_decision(fact: ParameterFacts, choice: _Choice, table: TableSpec | None, pricing: Pricing) -> Decision:
    """Returns the plan's record of the strategy chosen for a parameter, with its price and the other candidates.

    Args:
        fact: the facts about the parameter.
        table: the parameter as a table, or None if no lookup reads it.
    """
    chosen, sparsity = choice.chosen, pricing.findings.sparsity
    return Decision(
        fact.name,
        fact.shape,
        table is not None,
        chosen.strategy,
        choice.reason,
        chosen.exchange.sent_bytes,
        cost.all_reduce(fact.nbytes, pricing.world_size).sent_bytes if fact.trainable else 0,
        chosen.predicted_ms,
        chosen.scheme,
        chosen.grid,
        choice.candidates(),
        str(sparsity[fact.name]) if fact.name in sparsity else "",
        chosen.defers_rows,
        table.uses[0].padding_idx if table is not None and table.uses else -1,
        _expected_rows(table, pricing.findings) if table is not None else None,
        chosen.norm_bytes,
        chosen.head if chosen.strategy == "vocabulary" else None,
        chosen.travels_as,
        sparse=table is not None and table.has_sparse_gradient,
    )


def _expected_rows(table: TableSpec, findings: Findings) -> RowCounts | None:
    """Predicts how many of a table's rows a step reads, from the rows that the first batches have read. Returns None if
    no rows of the table are known to be read.
    """
    by_rank = findings.rows.get(table.parameter, ())
    if not any(by_rank):
        return None
    lies = findings.sparsity.get(table.parameter)
    together = sum(by_rank) if lies is None else round(lies.union)
    return RowCounts(max(by_rank), sum(by_rank), min(together, table.num_rows))


def _sharded_to_share_latency(choices: Mapping[str, _Choice], pricing: Pricing) -> dict[str, _Choice]:
    """Finds unsharded tables that should be sharded after all, because joined tables share the latency of one exchange.
    Returns the tables' new choices by name.

    Without latency, the AlltoAll of each of these tables adds less time to a step than its AllReduce. The tables are
    sharded if they can be joined to a table that is sharded anyway, or if together they save more than the latency of
    one exchange.
    """
    facts = pricing.findings.facts
    whole = {fact.name: choices[fact.name] for fact in facts if choices[fact.name].reason_if_sharded}
    gains_ms = {name: _gain_ms(choice, pricing.in_use.get(name)) for name, choice in whole.items()}
    better = {name for name, gain_ms in gains_ms.items() if gain_ms > 0}
    fit = [fact for fact in facts if fact.name in better or _is_by_columns(choices[fact.name])]
    travelling = {}
    for space in _join_tables(pricing.findings, fit):
        joining = better.intersection(space.tables)
        start_ups_ms = max((whole[name].priced["alltoall"].start_ups_ms for name in joining), default=0.0)
        if len(joining) < len(space.tables) or sum(gains_ms[name] for name in joining) > start_ups_ms:
            for name in joining:
                priced, read = whole[name].priced, whole[name].reason_if_sharded
                sharing = f"shares start-ups with {len(space.tables) - 1} others; {read}"
                travelling[name] = _Choice(priced["alltoall"], sharing, priced)
    return travelling


def _gain_ms(choice: _Choice, in_use: Decision | None) -> float:
    """Predicts how many milliseconds per step are saved if an unsharded table is sharded and shares the latency of its
    exchange. If both strategies take nearly the same time, the result favors the strategy in use.

    Args:
        choice: the choice to keep the table whole.
        in_use: the table's decision in the current plan, or None.
    """
    whole_ms, sharded_ms = choice.chosen.sharing_ms, choice.priced["alltoall"].sharing_ms
    if in_use is None:
        return whole_ms - _tie_factor(choice.sparsely_read) * sharded_ms
    return whole_ms - CLEARLY * sharded_ms if in_use.strategy == "alltoall" else CLEARLY * whole_ms - sharded_ms


def _tie_factor(sparsely_read: bool) -> float:
    """Returns the factor f such that a table is kept whole only if this takes less than f times the time of sharding
    it. The factor is below 1 if each rank reads few of the table's rows.
    """
    return CLEARLY if sparsely_read else 1.0


def _is_by_columns(choice: _Choice) -> bool:
    """Returns whether a choice shards a table by columns only."""
    return choice.chosen.strategy == "alltoall" and choice.chosen.grid is None


def _join_tables(findings: Findings, facts: Iterable[ParameterFacts]) -> tuple[JoinedTable, ...]:
    """Returns the groups of tables to join, among the column-sharded tables described by `facts`."""
    tables = {table.parameter: table for table in findings.graph.tables}
    fit = [Joinable(tables[each.name], each.param_group, ceil(each.nbytes / findings.world_size)) for each in facts]
    return plan_joined_tables(findings.graph, fit, overlaps=findings.schedule != "none")


def _choose_for_dense(pricing: Pricing, fact: ParameterFacts, requested: str | Grid) -> _Choice:
    """Chooses a strategy for a parameter that no lookup reads. This is the strategy that the user requests, if any.
    Otherwise it is AllReduce, unless sharding an output layer is clearly faster.

    Args:
        fact: the facts about the parameter.
        requested: the strategy that the user requested, or "auto".
    """
    weighed = ("vocabulary",) if fact.name in pricing.losses else ()
    asked = () if requested == "auto" else ("vocabulary", *EXCHANGES)
    priced = pricing.price_dense(fact, ("allreduce", *weighed, *asked))
    assert isinstance(requested, str)  # only tables can have a grid
    if requested == "auto":
        whole = _Choice(priced["allreduce"], "dense gradient", priced if weighed else {})
        return _choose_for_head(pricing, fact, priced, "") or whole
    if requested == "vocabulary":
        head = priced[requested]
        chosen = head if head.blocker is None else priced["allreduce"]
        return _Choice(chosen, head.blocker or "requested; output layer sharded", priced, f"{requested} was requested")
    reason = "requested" if requested == "allreduce" else "requested; predicted for a gradient without zeros"
    return _Choice(priced[requested], reason, priced, f"{requested} was requested")


def _choose_for_table(
    pricing: Pricing, table: TableSpec, fact: ParameterFacts, rows: tuple[int, ...], requested: str | Grid
) -> _Choice:
    """Chooses a table's strategy: the one that the user requested, if it is legal, or else the fastest one.

    Args:
        pricing: prices the strategies.
        fact: the facts about the table's parameter.
        rows: how many rows each rank reads in a step.
        requested: the strategy or grid that the user requested, or "auto".
    """
    priced = pricing.price_table(table, fact, rows, requested)
    sharded, allreduce = priced["alltoall"], priced["allreduce"]
    requested = "alltoall" if isinstance(requested, Grid) else requested
    requested = "auto" if requested == "vocabulary" and table.use == "sparse" else requested
    mean_rows = sum(rows) / max(len(rows), 1)
    share = mean_rows / max(table.num_rows, 1)
    grid = sharded.grid or Grid(1, pricing.world_size)
    width = f"{-(-table.embedding_dim // grid.columns)} columns per rank"
    read = f"{mean_rows:.0f} of {table.num_rows} rows read ({share:.2%})"
    what = f"{read}, {grid}, {width}" if sharded.grid is not None else f"{read}, {width}"
    blocker = sharded.blocker
    if (choice := _choose_requested(priced, requested, read, what)) is not None:
        return choice
    if (choice := _choose_for_head(pricing, fact, priced, read)) is not None:
        return choice
    if blocker is None and fact.dense_update_policy == "lazy":
        return _Choice(sharded, f"updated by rows; {what}", priced, "it is updated by rows")
    constant = all(use.constant_ids for use in table.uses)
    if blocker is None and constant:
        return _Choice(allreduce, "its ids do not depend on the batch", priced, "its ids never change")
    # Compare times first. If they are equal, as on a single rank, compare the share of rows that are read.
    faster = (_tie_factor(share < DENSELY) * sharded.added_ms, share) < (allreduce.added_ms, DENSELY)
    cheaper = blocker is None and (faster or allreduce.blocker is not None)
    best = _worthwhile_sparse_exchange(pricing, priced) or ("alltoall" if cheaper else "allreduce")
    in_use = pricing.in_use[fact.name].strategy if fact.name in pricing.in_use else best
    reason_if_sharded = what if blocker is None and sharded.grid is None else ""
    # A legal strategy stays in use unless another one is clearly faster.
    if best != in_use and priced[in_use].blocker is None and priced[best].added_ms >= CLEARLY * priced[in_use].added_ms:
        against = f"{in_use} is in use, {best} not clearly faster"
        reason_if_sharded = reason_if_sharded if in_use == "allreduce" else ""
        return _Choice(priced[in_use], f"in use; {what}", priced, against, reason_if_sharded, share < DENSELY)
    if best in EXCHANGES:
        return _Choice(priced[best], f"{blocker}; {read}" if blocker else read, priced)
    if best == "alltoall":
        near = sharded.added_ms > allreduce.added_ms
        return _Choice(sharded, f"a whole table is not clearly faster; {what}" if near else what, priced)
    reason = blocker or _whole_because(sharded, allreduce, what)
    return _Choice(allreduce, reason, priced, "", reason_if_sharded, share < DENSELY)


def _choose_for_head(
    pricing: Pricing, fact: ParameterFacts, priced: Mapping[str, PricedStrategy], read: str
) -> _Choice | None:
    """Returns the choice to shard the weight of an output layer by rows. Returns None unless the loss is in the graph
    and sharding is clearly faster.

    Args:
        fact: the facts about the weight.
        priced: strategy -> price.
        read: a text for the reason, which says how many rows lookups read. "" if no lookup reads the weight.
    """
    head = priced.get("vocabulary")
    if head is None or head.blocker is not None or fact.name not in pricing.losses:
        return None
    in_use = fact.name in pricing.in_use and pricing.in_use[fact.name].strategy == "vocabulary"
    limit_ms = priced["allreduce"].added_ms * (1.0 / CLEARLY if in_use else CLEARLY)
    if head.added_ms >= limit_ms:
        return None
    return _Choice(head, f"output layer sharded; {read}" if read else "output layer sharded", priced)


def _choose_requested(priced: Mapping[str, PricedStrategy], requested: str, read: str, what: str) -> _Choice | None:
    """Returns the choice that follows the user's request, or a legal replacement for it. Returns None if `requested` is
    "auto", or if neither the requested sharding nor AllReduce is legal.

    Args:
        priced: strategy -> price.
        read: a text for the reason, which says how many rows are read.
        what: a text for the reason, which says how many rows are read and how many columns each rank would store.
    """
    if requested == "auto":
        return None
    asked, blocker, allreduce = f"{requested} was requested", priced[requested].blocker, priced["allreduce"]
    if requested in SHARDED:
        if blocker is None:
            how = f"{read}, output layer sharded" if requested == "vocabulary" else what
            return _Choice(priced[requested], f"requested; {how}", priced, asked)
        return _Choice(allreduce, blocker, priced, asked) if allreduce.blocker is None else None
    if blocker is not None:
        cheapest = _cheapest_exchange(priced)
        assert cheapest is not None  # one of the exchanges can send every gradient
        return _Choice(cheapest, f"{asked}, {blocker}; {read}", priced, "others are faster")
    if requested == "allreduce":
        return _Choice(allreduce, priced["alltoall"].blocker or "requested", priced, asked)
    return _Choice(priced[requested], f"requested; {read}", priced, asked)


def _whole_because(sharded: PricedStrategy, allreduce: PricedStrategy, what: str) -> str:
    """Returns the reason why a table is kept whole although it could be sharded.

    Args:
        sharded: the price of sharding the table.
        allreduce: the price of keeping the table whole.
        what: a text that says how many rows are read and how many columns each rank would store.
    """
    if allreduce.added_ms == sharded.added_ms:
        return f"densely read: {what}"
    return f"AllReduce adds {allreduce.added_ms:.3f} ms to a step, shards add {sharded.added_ms:.3f} ms: {what}"


def _watched_tables(pricing: Pricing, tables: Mapping[str, tuple[TableSpec, ParameterFacts]]) -> tuple[str, ...]:
    """Returns the tables whose fastest strategy depends on how many rows ranks read. Of tables that differ only in
    their names, one is priced for all.

    Args:
        tables: name -> (the table, the facts about its parameter).
    """
    findings = replace(pricing.findings, sparsity={}, local_rows={})
    anywhere = replace(pricing, findings=findings, in_use={})
    kinds = {name: _kind(findings, *found) for name, found in tables.items()}
    of_kind = {kind: tables[name] for name, kind in kinds.items()}
    depend = {kind for kind, found in of_kind.items() if _depends_on_rows(anywhere, *found)}
    return tuple(name for name, kind in kinds.items() if kind in depend)


def _kind(findings: Findings, table: TableSpec, fact: ParameterFacts) -> tuple[object, ...]:
    """Returns what the prices of a table depend on, besides measured rows and the plan in use. Tables of one kind have
    the same prices. A table that an output layer reads is a kind of its own.
    """
    uses = tuple(replace(use, lookup="", backward=(), ids="", source="") for use in table.uses)
    nameless = replace(table, parameter="", uses=uses), replace(fact, name="", param_group=0, tied=())
    return *nameless, findings.sent_itemsizes[table.parameter], "" if table.use == "sparse" else fact.name


def _depends_on_rows(pricing: Pricing, table: TableSpec, fact: ParameterFacts) -> bool:
    """Returns whether the fastest strategy of a table depends on how many rows ranks read.

    Args:
        pricing: prices strategies without measured rows or a plan in use.
        fact: the facts about the table's parameter.
    """
    rows = {ceil(table.num_rows * share) for share in SHARES}
    choices = [_choose_for_table(pricing, table, fact, (each,) * pricing.world_size, "auto") for each in rows]
    best = {(c.chosen.strategy, bool(c.reason_if_sharded) and _gain_ms(c, None) > 0) for c in choices}
    return len(best) > 1


def _worthwhile_sparse_exchange(pricing: Pricing, priced: Mapping[str, PricedStrategy]) -> str | None:
    """Returns the fastest sparse exchange if it is clearly faster than AllReduce and AlltoAll, otherwise None.

    Exchanges that send as many bytes as AllReduce are not considered. They could be faster only through an error in the
    measured links.

    Args:
        priced: strategy -> price.
    """
    most = priced["allreduce"].exchange.sent_bytes if priced["allreduce"].blocker is None else inf
    fewer = {name: each for name, each in priced.items() if each.exchange.sent_bytes < most}
    if (cheapest := _cheapest_exchange(fewer)) is None:
        return None
    others = [p for p in priced.values() if p.strategy not in EXCHANGES and p.blocker is None]
    limits_ms = (each.sharing_ms * (CLEARLY if each.strategy == "alltoall" else 1.0) for each in others)
    return cheapest.strategy if cheapest.added_ms < min(limits_ms, default=inf) else None


def _cheapest_exchange(priced: Mapping[str, PricedStrategy]) -> PricedStrategy | None:
    """Returns the fastest legal sparse exchange among the prices of strategies, or None if there is none."""
    legal = (each for name, each in priced.items() if name in EXCHANGES and each.blocker is None)
    return min(legal, key=lambda each: each.predicted_ms, default=None)


def _compare_times(other: PricedStrategy, chosen: PricedStrategy) -> str:
    """Returns a text that explains, by predicted times, why `chosen` was preferred to `other`."""
    ratio = other.predicted_ms / max(chosen.predicted_ms, 1e-9)
    times = f"{ratio:.2f} times the time"
    if ratio > 1:
        return times
    if other.strategy in EXCHANGES and chosen.strategy == "alltoall":
        return f"{times}, but not below {CLEARLY:.0%} without start-ups, and replicas hold every row"
    return f"{times}, but not without the start-ups that {chosen.strategy} shares"
