"""The options of `compile`, and what values they can have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from embrace_fx.cost.links import Cluster
from embrace_fx.cost.wire import FORMATS, Format
from embrace_fx.passes.planner.asked_strategies import Strategy, check_strategy
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import SCHEDULES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Optimizers = Optimizer | Sequence[Optimizer] | None
"""What may be given as the optimizer."""


@dataclass(frozen=True)
class Options:
    """The options of `compile`."""

    strategy: Strategy
    schedule: str
    row_updates: RowUpdatesOption
    backend: str
    dynamic: bool | None
    cluster: Cluster | None = None
    plan: Plan | str | Path | None = None
    memory_budget: float | None = None
    check_replicas: int | None = None
    broadcast_buffers: bool = True
    forward_sync_buffers: bool = True
    dump_to: str | Path | None = None
    offload_to: str | Path | None = None
    device_mesh: DeviceMesh | None = None
    route: str | None = None
    rows: Format = "exact"
    buckets: Format = "exact"

    @property
    def shares_buffers(self) -> bool:
        """Whether forwards read rank 0's buffers."""
        return self.broadcast_buffers and self.forward_sync_buffers

    @cached_property
    def given_plan(self) -> Plan | None:
        """The plan to repeat, from its file where it is one.

        Raises:
            ValueError: it is none.
        """
        return self.plan if isinstance(self.plan, Plan | None) else Plan.load(self.plan)

    def agreed(self) -> str:
        """The options that must be the same on all ranks, as text. Of a plan its contents count, not its file; folders
        of dumps and copies, and a rank's own view of the ranks, do not.
        """
        plan = self.given_plan
        offloads = None if self.offload_to is None else "somewhere"
        return repr(replace(self, plan=None, dump_to=None, offload_to=offloads, device_mesh=None)) + (
            f" and a plan of digest {plan.digest()}" if plan is not None else ""
        )

    def check(self, where: str = "compile()") -> None:
        """Raises `ValueError` where an option has a value that does not exist; `where` is the call that it names."""
        allowed = {
            "schedule": SCHEDULES,
            "row_updates": ("exact", "sweep", "replay", "lazy"),
            "backend": ("eager", "inductor"),
            "route": (None, "graph", "eager"),
            "rows": FORMATS,
            "buckets": FORMATS,
        }
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
        budget: object = self.memory_budget
        if budget is not None and not (isinstance(budget, int | float) and budget > 0):
            raise ValueError(
                f"expected memory_budget to be None, bytes, or a fraction below 1, in {where}, found {budget!r}. Pass "
                "0.5 for half of what a step holds where everything is saved, or a number of bytes."
            )
        every: object = self.check_replicas
        if every is not None and not (type(every) is int and every > 0):
            raise ValueError(
                f"expected check_replicas to be None or a number of steps, in {where}, found {every!r}. Pass 1000 to "
                "compare replicas at every thousandth call."
            )
        if not isinstance(self.dump_to, str | Path | None):
            raise ValueError(
                f"expected dump_to to be None or the path of a folder, in {where}, found {self.dump_to!r}. Pass a path."
            )
        if not isinstance(self.offload_to, str | Path | None):
            raise ValueError(
                f"expected offload_to to be None or the path of a directory, in {where}, found {self.offload_to!r}. "
                "Pass a path."
            )
        if self.offload_to is not None and budget is None:
            raise ValueError(
                f"expected memory_budget with offload_to, in {where}, found none: nothing is offloaded without a "
                "budget. Pass memory_budget, or leave out offload_to."
            )
        check_strategy(self.strategy, where)
        if not isinstance(self.plan, Plan | str | Path | None):
            raise ValueError(
                f"expected plan to be an embrace_fx.Plan, or the path of a saved one, in {where}, found {self.plan!r}. "
                "Pass what model.plan gave, or what its save() wrote."
            )
        if self.given_plan is not None and self.strategy != "auto":
            raise ValueError(
                f"expected a plan or a strategy, in {where}, found both, and the plan says which strategy each "
                f"parameter has. Leave out strategy={self.strategy!r}, or the plan."
            )
        if not isinstance(self.cluster, Cluster | None):
            raise ValueError(
                f"expected cluster to be an embrace_fx.Cluster, in {where}, found {self.cluster!r}. Give its "
                "links' bandwidth in bytes per millisecond and latency in milliseconds: Cluster(3.1e6, 0.05), 25 Gb/s."
            )


def as_tuple(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """Puts an optimizer, or several, into a tuple; all ranks check together that they are optimizers."""
    given: Any = () if optimizer is None else optimizer
    return tuple(given) if isinstance(given, list | tuple) else (given,)
