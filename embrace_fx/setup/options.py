"""The options of `compile`, and checks of their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from torch.optim import Optimizer

from embrace_fx.cost.links import Cluster
from embrace_fx.cost.wire import FORMATS, Format
from embrace_fx.passes.planner.asked_strategies import Strategy, check_strategy
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from embrace_fx.vocabulary.plan import SHARDED, Grid, Plan
from embrace_fx.vocabulary.schedule import AUTO, SCHEDULES

Optimizers = Optimizer | Sequence[Optimizer] | None
"""Type of the argument `optimizer` of `compile`."""


@dataclass(frozen=True)
class Options:
    """The options of `embrace_fx.compile`, which documents them."""

    strategy: Strategy = "auto"
    schedule: str = AUTO
    row_updates: RowUpdatesOption = "exact"
    backend: str = "eager"
    cluster: Cluster | None = None
    plan: Plan | str | Path | None = None
    memory_budget: float | None = None
    broadcast_buffers: bool | Literal["once"] = True
    route: str | None = None
    rows: Format = "exact"
    table_memory: float | Mapping[str, float] | None = None
    spill_to: str | Path | None = None

    @property
    def shares_buffers(self) -> bool:
        """Whether all ranks use rank 0's buffers in each forward (`broadcast_buffers=True`)."""
        return self.broadcast_buffers is True

    @property
    def asked_strategies(self) -> list[str | Grid]:
        """The strategies in the plan that the user has passed to `compile`. Without a plan, the strategies that the
        user has requested.
        """
        if self.given_plan is not None:
            return [decision.strategy for decision in self.given_plan]
        return [*self.strategy.values()] if isinstance(self.strategy, Mapping) else [self.strategy]

    @property
    def shards_by_request(self) -> bool:
        """Whether the requested strategy or the given plan shards a table."""
        return any(each in SHARDED or isinstance(each, Grid) for each in self.asked_strategies)

    @cached_property
    def given_plan(self) -> Plan | None:
        """The plan that the user passed to `compile`, read from its file if a path was given, or None."""
        return self.plan if isinstance(self.plan, Plan | None) else Plan.load(self.plan)

    def text_to_compare(self) -> str:
        """Returns the options as text. The texts of all ranks must be equal.

        The text contains only whether `spill_to` is set, because its value may differ between ranks. A given plan is
        represented by its digest.
        """
        plan = self.given_plan
        own = replace(self, plan=None, spill_to=None if self.spill_to is None else "somewhere")
        return repr(own) + (f" and a plan of digest {plan.digest()}" if plan is not None else "")

    def check(self, where: str = "compile()") -> None:
        """Raises `ValueError` if an option has a wrong value.

        Args:
            where: the call to name in the error message.
        """
        allowed = {
            "schedule": (AUTO, *SCHEDULES),
            "row_updates": ("exact", "sweep", "replay", "lazy"),
            "backend": ("eager", "inductor"),
            "route": (None, "graph", "eager"),
            "broadcast_buffers": (True, False, "once"),
            "rows": FORMATS,
        }
        for name, values in allowed.items():
            found = getattr(self, name)
            if found not in values:
                raise ValueError(f"{where}: {name} is {found!r}. Pass one of {', '.join(map(repr, values))}.")
        budget: object = self.memory_budget
        if budget is not None and not (isinstance(budget, int | float) and budget > 0):
            raise ValueError(
                f"{where}: memory_budget is {budget!r}. Pass a number of bytes, or a fraction below 1: 0.5 is half of "
                "the memory that a step takes if it recomputes and offloads nothing."
            )
        if not isinstance(self.spill_to, str | Path | None):
            raise ValueError(f"{where}: spill_to is {self.spill_to!r}. Pass the path of a directory, or None.")
        if self.spill_to is not None and budget is None and self.table_memory is None:
            raise ValueError(
                f"{where}: spill_to has no effect without a memory limit. Pass table_memory or memory_budget too, or "
                "leave out spill_to."
            )
        self._check_tables(where)
        check_strategy(self.strategy, where)
        if not isinstance(self.plan, Plan | str | Path | None):
            raise ValueError(
                f"{where}: plan is {self.plan!r}. Pass an embrace_fx.Plan, such as model.plan, or the path of a file "
                "written by plan.save(path)."
            )
        if self.given_plan is not None and self.strategy != "auto":
            raise ValueError(
                f"{where}: both a plan and strategy={self.strategy!r} are given, but the plan already has a strategy "
                "for each parameter. Leave out one of the two options."
            )
        if not isinstance(self.cluster, Cluster | None):
            raise ValueError(
                f"{where}: cluster is {self.cluster!r}. Pass an embrace_fx.Cluster with the bandwidth of its links in "
                "bytes per millisecond and their latency in milliseconds. For 25 Gb/s and 50 us: Cluster(3.1e6, 0.05)."
            )

    def _check_tables(self, where: str) -> None:
        """Raises `ValueError` if an option about tables has a wrong value.

        Args:
            where: the call to name in the error message.
        """
        memory: object = self.table_memory
        of_tables = list(memory.values()) if isinstance(memory, Mapping) else [] if memory is None else [memory]
        if not all(isinstance(each, int | float) and each > 0 for each in of_tables):
            raise ValueError(
                f"{where}: table_memory is {memory!r}. Pass a number of bytes for all tables together, or a fraction "
                "of each table's rows, such as 0.1. To limit single tables, pass a mapping from their names to such "
                "values, such as {'embedding.weight': 2**30}."
            )
        if memory is not None and self.rows != "exact":
            raise ValueError(
                f"{where}: table_memory does not work with rows={self.rows!r}, because the rounding errors of "
                "gradients would be kept in memory. Leave out one of the two options."
            )


def as_tuple(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """Returns the argument `optimizer` of `compile` as a tuple. Does not check it, because all ranks check it together
    later.
    """
    given: Any = () if optimizer is None else optimizer
    return tuple(given) if isinstance(given, list | tuple) else (given,)
