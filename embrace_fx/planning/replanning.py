"""Watches whether another plan is due: rows that ranks read from step to step, against those planned for.

Contract
    Rank 0 alone follows the numbers that ranks announce anyway. It asks for a plan in its own next announcement, which
    all ranks hear in the same step. What is then planned, on fresh measurements, is rank 0's decision too; the new plan
    is in place before the next step begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from embrace_fx.planning.findings import Findings
from embrace_fx.planning.last_run import changes
from embrace_fx.runtime.ranks.announcement import Announcement
from embrace_fx.runtime.ranks.checksums import digest_of
from embrace_fx.vocabulary.plan import Plan

SAMPLED_EVERY = 4
"""Calls for training: of replicas, the rows of a batch have to be counted for this alone."""
WEIGHT = 0.25
"""Of a sample in the running mean, which so remembers about 16 calls."""
LOOK_EVERY = 4
"""Samples between two looks at whether another plan would be better."""
CONFIRMED_BY = 2
"""Looks in a row that must want the same strategies: one batch unlike the others changes nothing."""
DRIFTED = 0.2
"""Share of the rows planned for by which a mean must have moved before it is worth a look."""


@dataclass
class Calls:
    """The state that a model's calls share, and that its next announcement tells of.

    Attributes:
        count: of calls for training.
        asks_to_plan: this rank would have another plan made.
        rows_seen: of watched tables, in the coming step.
        checksums: of this rank's replicas, where the coming step is to compare them; else empty.
        authority: the rank whose buffers count.
        uneven: ranks may have taken different numbers of optimizer steps (`join`).
        ahead: batches that the loader is read ahead.
    """

    count: int = 0
    asks_to_plan: bool = False
    rows_seen: dict[str, int] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    authority: int = 0
    uneven: bool = False
    ahead: int = 0

    def announcement(self, own: Announcement, optimizer_steps: int) -> Announcement:
        """Completes what a step announces by what it is to tell once."""
        seen, self.rows_seen = self.rows_seen, {}
        checksums, self.checksums = self.checksums, {}
        return replace(
            own,
            asks_to_plan=self.asks_to_plan,
            steps=0 if self.uneven else optimizer_steps,
            digest=digest_of(checksums),
            rows_seen=seen,
            checksums=checksums,
        )


class Drift:
    """Follows what ranks read of the tables whose strategy depends on it. Of rank 0 alone.

    Attributes:
        wants_plan: another plan is clearly better; stays so until there is one.
    """

    def __init__(self, plan: Plan, findings: Findings) -> None:
        self._plan = plan
        self._findings = findings
        self._means = {name: [float(n) for n in findings.rows[name]] for name in plan.watched}
        self._planned_for = {name: list(mean) for name, mean in self._means.items()}
        self._samples = 0
        self._wanted: tuple[str, ...] = ()
        self._confirmed = 0
        self.wants_plan = False

    @property
    def rows(self) -> dict[str, tuple[int, ...]]:
        """Running means of the rows that each rank reads, by table."""
        return {name: tuple(round(n) for n in mean) for name, mean in self._means.items()}

    def observe(self, rows_read: Mapping[str, Sequence[int]]) -> None:
        """Takes one step's announced rows, by table and rank; below 0 where a rank does not know."""
        for name, mean in self._means.items():
            rows = rows_read.get(name, ())
            if rows and min(rows) >= 0:
                for rank, n in enumerate(rows):
                    mean[rank] += WEIGHT * (n - mean[rank])
        self._samples += 1
        if self._samples % LOOK_EVERY == 0 and not self.wants_plan:
            self._look()

    def _look(self) -> None:
        wanted: tuple[str, ...] = ()
        if any(_far(self._means[name], self._planned_for[name]) for name in self._means):
            plan = self._findings.with_rows(self.rows).plan(self._plan.links, self._plan.links_are, self._plan)
            if changes(self._plan, plan):
                wanted = tuple(decision.strategy for decision in plan)
            else:
                self._planned_for = {name: list(mean) for name, mean in self._means.items()}
        self._confirmed = self._confirmed + 1 if wanted and wanted == self._wanted else int(bool(wanted))
        self._wanted = wanted
        self.wants_plan = self._confirmed >= CONFIRMED_BY


def _far(mean: Sequence[float], planned_for: Sequence[float]) -> bool:
    return abs(sum(mean) - sum(planned_for)) > DRIFTED * sum(planned_for)


def story(calls: int, old: Plan, new: Plan) -> str:
    """Tells in one line what a new plan changes, and why.

    Args:
        calls: of the model, for training, so far.
    """
    told = []
    for name in changes(old, new):
        before, after = old[name], new[name]
        here = next((c.predicted_ms for c in after.candidates if c.strategy == before.strategy), before.predicted_ms)
        told.append(
            f"{name} {before.strategy} -> {after.strategy} ({after.reason}; planned for: {before.reason}; predicted "
            f"{after.predicted_ms:.3f} ms instead of {here:.3f} ms)"
        )
    return f"after {calls} calls: {'; '.join(told) or 'buckets in the order of the backward'}"
