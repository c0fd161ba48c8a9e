"""The options of `compile`, and what values they can have."""

from __future__ import annotations

from dataclasses import dataclass

from embrace_fx.cost import Cluster
from embrace_fx.exactness import RowUpdates
from embrace_fx.passes.planner import Strategy
from embrace_fx.plan import STRATEGIES
from embrace_fx.schedule import SCHEDULES


@dataclass(frozen=True)
class Options:
    """The options of `compile`."""

    strategy: Strategy
    schedule: str
    row_updates: RowUpdates
    backend: str
    dynamic: bool | None
    cluster: Cluster | None = None

    def check(self) -> None:
        """Raises `ValueError` where an option has a value that does not exist."""
        allowed = {"schedule": SCHEDULES, "row_updates": ("exact", "lazy"), "backend": ("eager", "inductor")}
        for name, values in allowed.items():
            found = getattr(self, name)
            if found not in values:
                raise ValueError(
                    f"expected {name} to be one of {', '.join(map(repr, values))}, in compile(), found {found!r}."
                )
        if self.dynamic not in (None, True, False):
            raise ValueError(f"expected dynamic to be None, True or False, in compile(), found {self.dynamic!r}.")
        if isinstance(self.strategy, str) and self.strategy not in (*STRATEGIES, "auto"):
            raise ValueError(
                f"expected strategy to be 'auto' or one of {', '.join(STRATEGIES)}, in compile(), found "
                f"{self.strategy!r}."
            )
