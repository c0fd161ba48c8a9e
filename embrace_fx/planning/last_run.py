"""The plan of the last run: kept where another probe of the same links would change it back and forth.

Contract
    A probe measures links while others use them: two runs of one script find other rates. Strategies that are nearly as
    fast would follow these. So the plan that the last run of the same model, between the same ranks, began with counts
    as the one in use: another strategy must be clearly faster, and be so in `CONFIRMED_BY` runs in a row. Rank 0 alone
    reads and writes; where nothing is kept, or no links are probed, each run decides for itself.
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
    """Data that a run leaves to the next.

    Attributes:
        plan: that it began with.
        wanted: strategies that it would have chosen instead; none where they are the plan's.
        runs: in a row that wanted them.
    """

    plan: Plan
    wanted: tuple[str, ...] = ()
    runs: int = 0


def changes(old: Plan, new: Plan) -> tuple[str, ...]:
    """Parameters whose strategy another plan changes."""
    return tuple(d.parameter for d in new if d.strategy != old[d.parameter].strategy)


def as_last_run(key: Sequence[Any], links: Cluster, decide: Callable[[Cluster, Plan | None], Plan]) -> Plan:
    """The plan for links that have just been probed, with the strategies of the last run unless these are outdone.

    Args:
        key: what a plan follows from besides links and batches.
        decide: the plan for links, given the one in use.
    """
    key = (platform.node(), *key)
    last = recall(LastRun, *key)
    if last is None:
        found = decide(links, None)
    else:
        found = decide(links, last.plan)
        if changes(last.plan, found):
            before = decide(last.plan.links, last.plan)
            if not changes(last.plan, before):  # it is the links that want another one, not the batch
                wanted = tuple(decision.name for decision in found)
                runs = last.runs + 1 if wanted == last.wanted else 1
                if runs < CONFIRMED_BY:
                    keep(LastRun(last.plan, wanted, runs), *key)
                    return before
    keep(LastRun(found), *key)
    return found
