"""Watches how many rows ranks read, and requests a new plan when another strategy would be better.

Contract
    Only rank 0 follows the numbers, which ranks announce anyway. It asks for a plan in its next announcement, which all
    ranks get in the same step. Rank 0 then decides the new plan, by new measurements; it is in use before the next
    step begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.pricing import Findings
from embrace_fx.vocabulary.plan import Plan

SAMPLED_EVERY = 4
"""Training calls between two samples; the rows of replicas are counted only for this."""
WEIGHT = 0.25
"""Weight of a sample in the running mean, which thus covers about 16 calls."""
LOOK_EVERY = 4
"""Samples between two checks whether another plan would be better."""
CONFIRMED_BY = 2
"""Checks in a row that must find the same strategies, so that a single odd batch changes nothing."""
DRIFTED = 0.2
"""A check is made once a mean differs from the planned rows by this share."""


class SparsityMonitor:
    """Records, on rank 0, how many rows of a table each rank reads, for tables whose best strategy depends on these
    numbers. Requests a new plan when the numbers have changed so much that another strategy is better.

    Attributes:
        wants_plan: whether a new plan is requested.
    """

    def __init__(self, plan: Plan, findings: Findings) -> None:
        self._plan = plan
        self._findings = findings
        self._means = {name: [float(n) for n in findings.rows[name]] for name in plan.watched}
        self._planned_for = {name: list(mean) for name, mean in self._means.items()}
        self._shares = _planned_shares(plan)
        self._samples = 0
        self._wanted: tuple[str, ...] = ()
        self._confirmed = 0
        self.wants_plan = False

    @property
    def rows(self) -> dict[str, tuple[int, ...]]:
        """Maps each table to the running mean, for each rank, of the number of rows that the rank reads per step."""
        return {name: tuple(round(n) for n in mean) for name, mean in self._means.items()}

    def observe(self, rows_read: Mapping[str, Sequence[int]]) -> None:
        """Updates the running means with the row counts of one step.

        Args:
            rows_read: maps each table to the number of rows that each rank has read. Negative numbers are unknown.
        """
        for name, mean in self._means.items():
            of, share = self._shares.get(name, (name, 1.0))
            rows = rows_read.get(of, ())
            if rows and min(rows) >= 0:
                for rank, n in enumerate(rows):
                    mean[rank] += WEIGHT * (share * n - mean[rank])
        self._samples += 1
        if self._samples % LOOK_EVERY == 0 and not self.wants_plan:
            self._reconsider_plan()

    def _reconsider_plan(self) -> None:
        """Computes a new plan if the row counts have drifted. Sets `wants_plan` once several such plans in a row
        agree.
        """
        wanted: tuple[str, ...] = ()
        sums = {name: (sum(mean), sum(self._planned_for[name])) for name, mean in self._means.items()}
        drifted = [name for name, (read, planned) in sums.items() if abs(read - planned) > DRIFTED * planned]
        if drifted:
            plan = decide(self._findings.with_rows(self.rows), self._plan.links, self._plan)
            if names_with_new_strategy(self._plan, plan):
                wanted = tuple(decision.strategy for decision in plan)
            else:
                self._planned_for = {name: list(mean) for name, mean in self._means.items()}
        self._confirmed = self._confirmed + 1 if wanted and wanted == self._wanted else int(bool(wanted))
        self._wanted = wanted
        self.wants_plan = self._confirmed >= CONFIRMED_BY


def _planned_shares(plan: Plan) -> dict[str, tuple[str, float]]:
    """Maps each table that is part of a joined table to (joined table, the table's planned share of the rows that are
    read).
    """
    rows = plan.rows
    return {
        table: (space.name, rows[table].own / max(rows[space.name].own, 1))
        for space in plan.spaces
        if space.name in rows
        for table in space.tables
    }


def names_with_new_strategy(old: Plan, new: Plan) -> tuple[str, ...]:
    """Returns the names of the parameters that have another strategy in the plan `new` than in `old`."""
    return tuple(d.parameter for d in new if d.strategy != old[d.parameter].strategy)


def describe_replan(calls: int, reason: str, old: Plan, new: Plan) -> str:
    """Returns one line of text that says why a plan is replaced, what the new plan changes, and what it is expected to
    save.

    Args:
        calls: the number of training calls so far.
        reason: why the plan is replaced.
    """
    found, saved_ms = [], 0.0
    for name in names_with_new_strategy(old, new):
        before, after = old[name], new[name]
        here = next((c.predicted_ms for c in after.candidates if c.strategy == before.strategy), before.predicted_ms)
        saved_ms += here - after.predicted_ms
        found.append(
            f"{name} {before.strategy} -> {after.strategy} ({after.reason}; planned for: {before.reason}; predicted "
            f"{after.predicted_ms:.3f} ms instead of {here:.3f} ms)"
        )
    if old.schedule_name != new.schedule_name:
        found.append(f'schedule "{old.schedule_name}" -> {new.chosen_because}')
    if new.buckets != old.buckets and not found:
        found.append("buckets in another order")
    saves = f", predicted to save {saved_ms:.3f} ms per step" if saved_ms > 0 else ""
    return f"after {calls} calls ({reason}): {'; '.join(found) or 'no change'}{saves}"
