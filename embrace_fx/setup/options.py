"""The options of `compile`, and what values they can have."""

from __future__ import annotations

from dataclasses import dataclass

from embrace_fx.cost.links import Cluster
from embrace_fx.passes.planner.asked_strategies import Strategy, check_strategy
from embrace_fx.vocabulary.exactness import RowUpdates
from embrace_fx.vocabulary.schedule import SCHEDULES


@dataclass(frozen=True)
class Options:
    """The options of `compile`."""

    strategy: Strategy
    schedule: str
    row_updates: RowUpdates
    backend: str
    dynamic: bool | None
    cluster: Cluster | None = None

    def check(self, where: str = "compile()") -> None:
        """Raises `ValueError` where an option has a value that does not exist; `where` is the call that it names."""
        allowed = {"schedule": SCHEDULES, "row_updates": ("exact", "lazy"), "backend": ("eager", "inductor")}
        for name, values in allowed.items():
            found = getattr(self, name)
            if found not in values:
                raise ValueError(
                    f"expected {name} to be one of {', '.join(map(repr, values))}, in {where}, found {found!r}. Pass "
                    "one of these."
                )
        if self.dynamic not in (None, True, False):
            raise ValueError(
                f"expected dynamic to be None, True or False, in {where}, found {self.dynamic!r}. Pass one of these."
            )
        check_strategy(self.strategy, where)
        if not isinstance(self.cluster, Cluster | None):
            raise ValueError(
                f"expected cluster to be an embrace_fx.Cluster, in {where}, found {self.cluster!r}. Give its "
                "links' bandwidth in bytes per millisecond and latency in milliseconds: Cluster(3.1e6, 0.05), 25 Gb/s."
            )
