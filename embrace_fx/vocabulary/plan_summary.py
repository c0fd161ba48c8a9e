"""Summarizes a plan in one line, and gives a report's advice on sharding tables and saving the plan."""

from __future__ import annotations

from embrace_fx.vocabulary.plan import SHARDED, Decision, Plan
from embrace_fx.vocabulary.plan_text import readable_bytes

MOST_NAMED = 3
"""Maximum number of tables that a line names; it counts the others."""
LONGEST = 120 - len("embrace_fx: ")
"""Maximum characters of the line, without its prefix."""


def summarize(plan: Plan) -> str:
    """Returns one line that says which tables are sharded, which are whole, and how much a rank sends. It names tables
    if the names fit, and otherwise only counts them.

    >>> from embrace_fx.cost.links import Cluster
    >>> tables = [Decision("item", (9000, 8), True, "alltoall", "40 of 9000 rows read", 2048, 288000, 0.4)]
    >>> dense = [Decision("top", (8, 8), False, "allreduce", "dense gradient", 256, 256, 0.1)]
    >>> print(summarize(Plan(2, (*tables, *dense), (("top",),), links=Cluster(1e5, 0.1))).replace("; ", ";\\n"))
    1 table sharded: item, 0 whole;
    a rank sends 2.2 KiB per step, DDP 281.5 KiB;
    model.report() says why
    """
    if plan.world_size == 1:
        count = _count_tables(sum(d.is_table for d in plan))
        return f"1 rank, {count}: nothing is sent. Start more with torchrun, or plan for them with embrace_fx.plan()"
    sharded, whole = (
        [d.parameter for d in plan if d.is_table and (d.strategy in SHARDED) is shards and d.strategy != "frozen"]
        for shards in (True, False)
    )
    sent, ddp = readable_bytes(plan.sent_bytes_per_step), readable_bytes(sum(d.ddp_bytes_per_step for d in plan))
    rest = f"; a rank sends {sent} per step, DDP {ddp}; model.report() says why"
    for names in (_list_names(sharded), ""):
        for others in (_list_names(whole), ""):
            line = f"{_count_tables(len(sharded))} sharded{names}, {len(whole)} whole{others}{rest}"
            if len(line) <= LONGEST:
                return line
    return line


def _count_tables(count: int) -> str:
    """Returns the number `count` of tables as text: "1 table", "2 tables"."""
    return f"{count} table" if count == 1 else f"{count} tables"


def _list_names(names: list[str]) -> str:
    """Returns text with the first names and the number of the others, such as ": a, b, c and 2 more". Returns "" if
    there are no names.
    """
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f": {', '.join(names[:MOST_NAMED])}{more}"


def give_advice(plan: Plan) -> str:
    """Returns advice for a report: which unsharded table would cost the least to shard, and how to save and reuse the
    plan.
    """
    whole = [d for d in plan if d.is_table and d.strategy not in (*SHARDED, "frozen")]
    lines = []
    if (cheapest := _cheapest_to_shard(whole)) is not None:
        name, more_ms = cheapest
        lines.append(f'strategy={{"{name}": "alltoall"}} would shard {name} for {more_ms:+.1f} ms a step')
    if plan.world_size > 1:
        lines.append('model.plan.save("plan.json") keeps this plan; compile(model, plan="plan.json") repeats it')
    return "\n".join(lines)


def _cheapest_to_shard(whole: list[Decision]) -> tuple[str, float] | None:
    """Finds the table that would cost the least to shard. Returns (its name, milliseconds added to a step), or None if
    no table can be sharded.

    Args:
        whole: the decisions about unsharded tables.
    """
    costs_ms = {
        decision.parameter: candidate.predicted_ms - decision.predicted_ms
        for decision in whole
        for candidate in decision.candidates
        # For a table that cannot be sharded, the decision and this candidate have the same reason: skip the candidate.
        if candidate.strategy == "alltoall" and candidate.rejected != decision.reason
    }
    return min(costs_ms.items(), key=lambda item: item[1]) if costs_ms else None
