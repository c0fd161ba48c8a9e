"""Keeps the strategies of the last run, which would change with each probe of the same links otherwise.

Contract
    Others use the links while a probe measures them, so that two runs of one script find different rates, and nearly
    equal strategies would alternate. So the first plan of the last run, of the same model on the same ranks, counts
    as the plan in use: another strategy must be clearly faster in `CONFIRMED_BY` runs in a row. Only rank 0 reads and
    writes; where nothing is kept, or no links are probed, each run decides for itself.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from embrace_fx.cost.links import Cluster
from embrace_fx.setup.disk_cache import keep, recall
from embrace_fx.vocabulary.plan import Plan

CONFIRMED_BY = 3
"""Runs in a row that must want the same other strategies."""


@dataclass(frozen=True)
class LastRun:
    """Data that a run keeps for the next one.

    Attributes:
        plan: the run's first plan.
        wanted: the strategies that it would have chosen instead; empty where they are the plan's.
        runs: number of runs in a row that wanted them.
    """

    plan: Plan
    wanted: tuple[str, ...] = ()
    runs: int = 0


def changes(old: Plan, new: Plan) -> tuple[str, ...]:
    """Lists the parameters whose strategies differ between two plans."""
    return tuple(d.parameter for d in new if d.strategy != old[d.parameter].strategy)


def as_last_run(key: Sequence[Any], links: Cluster, decide: Callable[[Cluster, Plan | None], Plan]) -> Plan:
    """Decides the plan for newly probed links, with the strategies of the last run unless others are confirmed.

    Args:
        key: all that a plan depends on besides links and batches.
        decide: (links, the plan in use) -> plan.
    """
    key = (platform.node(), *key)
    last = recall(LastRun, *key)
    if last is None:
        found = decide(links, None)
    else:
        found = decide(links, last.plan)
        if changes(last.plan, found):
            before = decide(last.plan.links, last.plan)
            if not changes(last.plan, before):  # the links ask for another plan, not the batch
                wanted = tuple(decision.name for decision in found)
                runs = last.runs + 1 if wanted == last.wanted else 1
                if runs < CONFIRMED_BY:
                    keep(LastRun(last.plan, wanted, runs), *key)
                    return before
    keep(LastRun(found), *key)
    return found
