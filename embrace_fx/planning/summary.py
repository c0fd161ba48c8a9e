"""A plan in one line, for who has not asked: what was sharded, what was not, how to change that, what a step sends."""

from __future__ import annotations

from embrace_fx.cost.links import all_reduce
from embrace_fx.vocabulary.plan import Decision, Plan, readable_bytes

MOST_NAMED = 3
"""Tables that a line names; it counts the others."""


def summary(plan: Plan, step_ms: float | None) -> str:
    """The line.

    Args:
        step_ms: predicted, by the schedule; None where nothing is scheduled.

    >>> from embrace_fx.cost.links import Cluster
    >>> tables = [Decision("item", (9000, 8), True, "alltoall", "40 of 9000 rows read", 2048, 288000, 0.4)]
    >>> dense = [Decision("top", (8, 8), False, "allreduce", "dense gradient", 256, 256, 0.1)]
    >>> print(summary(Plan(2, (*tables, *dense), (("top",),), links=Cluster(1e5, 0.1)), 1.5).replace("; ", ";\\n"))
    1 table sharded: item, 0 whole;
    a rank sends 2.2 KiB a step, DDP 281.5 KiB (1/125);
    a step is predicted to take 1.5 ms without the optimizer, DDP's AllReduce alone 3.1 ms;
    model.report() tells why, model.schedule.save("schedule.html") draws it
    """
    if plan.world_size == 1:
        return (
            f"1 rank with {_tables(sum(d.is_table for d in plan))}: nothing is sent. Start it with torchrun on more, "
            "or ask embrace_fx.plan(model, batch, world_size=8) what they would do"
        )
    sharded, whole = (
        [d for d in plan if d.is_table and (d.strategy == "alltoall") is shards and d.strategy != "frozen"]
        for shards in (True, False)
    )
    ddp_bytes = sum(d.ddp_bytes_per_step for d in plan)
    ratio = f" (1/{ddp_bytes / plan.sent_bytes_per_step:.0f})" if 0 < plan.sent_bytes_per_step < ddp_bytes / 2 else ""
    parts = [
        f"{_tables(len(sharded))} sharded{_names([d.parameter for d in sharded])}, {len(whole)} whole"
        f"{_names([f'{d.parameter} ({d.reason})' for d in whole])}",
        *_change(whole),
        f"a rank sends {readable_bytes(plan.sent_bytes_per_step)} a step, DDP {readable_bytes(ddp_bytes)}{ratio}",
    ]
    if step_ms is not None:
        # Of a ring, a rank sends 2 (N - 1) / N of what is reduced.
        reduced = round(ddp_bytes * plan.world_size / (2 * (plan.world_size - 1)))
        ddp_ms = all_reduce(reduced, plan.world_size).time_ms(plan.links.among(plan.world_size), "all_reduce")
        parts.append(
            f"a step is predicted to take {step_ms:.1f} ms without the optimizer, DDP's AllReduce alone {ddp_ms:.1f} ms"
        )
    return "; ".join([*parts, 'model.report() tells why, model.schedule.save("schedule.html") draws it'])


def _tables(count: int) -> str:
    return f"{count} table" if count == 1 else f"{count} tables"


def _names(names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f": {', '.join(names[:MOST_NAMED])}{more}"


def _change(whole: list[Decision]) -> list[str]:
    """Advises on sharding what is whole, at the least cost; a table that could be sharded is named."""
    costs_ms = {
        decision.parameter: candidate.predicted_ms - decision.predicted_ms
        for decision in whole
        for candidate in decision.candidates
        # A candidate that nothing but its time speaks against: what is not legal is the decision's reason too.
        if candidate.strategy == "alltoall" and candidate.rejected != decision.reason
    }
    if not costs_ms:
        return []
    name = min(costs_ms, key=lambda each: costs_ms[each])
    return [f'strategy={{"{name}": "alltoall"}} would shard {name} for {costs_ms[name]:+.1f} ms a step']
