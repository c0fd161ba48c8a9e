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
from embrace_fx.vocabulary.plan import Grid, Plan
from embrace_fx.vocabulary.schedule import AUTO, SCHEDULES

Optimizers = Optimizer | Sequence[Optimizer] | None
"""The types accepted as optimizer."""


@dataclass(frozen=True)
class Options:
    """The options of `compile`.

    Attributes:
        strategy: "auto", one strategy for every table, or {parameter name pattern: strategy}. "alltoall" shards a
            table, an `embrace_fx.Grid` does by rows and columns; "allreduce" and the others of docs/strategies.md
            exchange the gradient of replicas, of any parameter that a pattern names.
        schedule: how much of a step's communication may run into the next step. "auto": "2d", or what is predicted to
            be clearly faster on known links. "none": nothing. "horizontal": dense gradients are reduced and applied
            until the next forward needs the parameters. "vertical": rows that the next batch does not read are
            exchanged and applied later; needs `lookahead`. "2d": both.
        row_updates: "exact": the optimizer's own semantics; where it moves rows without gradient too, all move at each
            step ("sweep" asks for it), or each takes the steps it has skipped when it is read next ("replay"),
            whichever is predicted to take less time. "lazy": rows without gradient stand still.
        backend: "eager": compute runs as ATen calls. "inductor": the compute between two communications is compiled
            into fused kernels; needs a C++ compiler, on CUDA Triton too.
        cluster: the links between ranks, by which strategies are chosen and messages cut. None: they are probed, where
            a step sends enough for it to matter.
        plan: a plan, or the path of a saved one, that is repeated: nothing is probed or decided anew. None: the plan is
            made at the first call.
        memory_budget: the most that forward and backward may hold at a time, in bytes, or, below 1, as a fraction of
            what they hold where everything is saved, but no less than can be; parameters, optimizer state and the batch
            come on top. What does not fit is computed again in the backward, or offloaded, at the least predicted cost
            (docs/memory.md). None: everything is saved that the model does not checkpoint itself.
        broadcast_buffers: as of DDP: forwards read rank 0's buffers. False: each rank keeps its own. "once": rank 0's
            are sent in compile(), and each rank goes on from those, as under DDP's forward_sync_buffers=False.
        spill_to: a directory for what does not fit, in files without a name: rows beyond `table_memory`; of a model on
            the CPU with a memory budget, saved values between forward and backward. None: those of a CUDA model lie in
            its host's memory; of a model on the CPU nothing may lie elsewhere.
        route: None: the forward is captured as a graph; where no graph holds it, it runs as it is written, on replicas,
            with gradients exchanged as the plan says (docs/from_ddp.md). "graph": a forward that no graph holds is an
            error. "eager": nothing is captured.
        rows: the format in which sharded tables' rows, their gradients and AllReduced gradients travel: "exact", as
            they are, or rounded to "bf16", "fp16" or "int8" (docs/exactness.md). Parameters stay what they are;
            evaluations read exact rows, and sparse exchanges of replicas stay exact.
        table_memory: what sharded tables and their optimizer state may hold of this rank's memory, in bytes, or, below
            1, as a fraction of their rows; for all of them, or by patterns of names (docs/memory.md). None: all.
    """

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
        """Whether forwards read rank 0's buffers."""
        return self.broadcast_buffers is True

    @property
    def shards_by_request(self) -> bool:
        """Whether a strategy, or the plan that is given, shards a table."""
        asked = [*self.strategy.values()] if isinstance(self.strategy, Mapping) else [self.strategy]
        sharded = self.given_plan is not None and bool(self.given_plan.sharded)
        return sharded or any(each == "alltoall" or isinstance(each, Grid) for each in asked)

    @cached_property
    def given_plan(self) -> Plan | None:
        """The plan to use again, read from its file where a path is given.

        Raises:
            ValueError: the file holds no plan.
        """
        return self.plan if isinstance(self.plan, Plan | None) else Plan.load(self.plan)

    def agreed(self) -> str:
        """Returns the options that must be the same on all ranks, as text: without folders, and with a plan's digest in
        place of its path.
        """
        plan = self.given_plan
        own = replace(self, plan=None, spill_to=None if self.spill_to is None else "somewhere")
        return repr(own) + (f" and a plan of digest {plan.digest()}" if plan is not None else "")

    def check(self, where: str = "compile()") -> None:
        """Raises `ValueError` where an option has a wrong value; `where`: the call that the error names."""
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
                raise ValueError(
                    f"expected {name} to be one of {', '.join(map(repr, values))}, in {where}, found {found!r}. Pass "
                    "one of these."
                )
        budget: object = self.memory_budget
        if budget is not None and not (isinstance(budget, int | float) and budget > 0):
            raise ValueError(
                f"expected memory_budget to be None, bytes, or a fraction below 1, in {where}, found {budget!r}. Pass "
                "0.5 for half of what a step holds where everything is saved, or a number of bytes."
            )
        if not isinstance(self.spill_to, str | Path | None):
            raise ValueError(
                f"expected spill_to to be None or the path of a directory, in {where}, found {self.spill_to!r}. Pass a "
                "path."
            )
        if self.spill_to is not None and budget is None and self.table_memory is None:
            raise ValueError(
                f"expected table_memory or memory_budget with spill_to, in {where}, found neither: nothing leaves "
                "memory without a limit. Pass one of them, or leave out spill_to."
            )
        self._check_tables(where)
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

    def _check_tables(self, where: str) -> None:
        memory: object = self.table_memory
        of_tables = list(memory.values()) if isinstance(memory, Mapping) else [] if memory is None else [memory]
        if not all(isinstance(each, int | float) and each > 0 for each in of_tables):
            raise ValueError(
                f"expected table_memory to be None, bytes, a fraction below 1, or one of these by table, in {where}, "
                f"found {memory!r}. Pass 0.1 for a tenth of each table's rows, or {{'embedding.weight': 2**30}}."
            )
        if memory is not None and self.rows != "exact":
            raise ValueError(
                f"expected rows='exact' with table_memory, in {where}, found {self.rows!r}: what is rounded off a "
                "row's gradient is kept in memory. Leave out one of them."
            )


def as_tuple(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """Puts an optimizer, or several, into a tuple, unchecked: all ranks check them together later."""
    given: Any = () if optimizer is None else optimizer
    return tuple(given) if isinstance(given, list | tuple) else (given,)
