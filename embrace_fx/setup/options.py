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
"""What `compile` accepts as optimizer."""


@dataclass(frozen=True)
class Options:
    """The options of `compile`.

    Attributes:
        strategy: "auto", one strategy for every table, or {parameter name pattern: strategy}. "alltoall" shards a table
            by columns, an `embrace_fx.Grid` by rows and columns. "allreduce" and the others (docs/strategies.md) keep a
            parameter whole and exchange its gradient; a pattern may name any parameter.
        schedule: how far a step's communication may run into the next step. "none": not at all. "horizontal": dense
            gradients are reduced and applied until the next forward reads the parameters. "vertical": rows that the
            next batch does not read are exchanged and applied later; needs `lookahead`. "2d": both. "auto": the
            fastest by prediction, and "2d" if the links are not known.
        row_updates: "exact": the optimizer's own semantics. If the optimizer moves rows without gradient, either all
            rows move at each step ("sweep" asks for this), or a row takes the steps that it has skipped when it is next
            read ("replay"), whichever is predicted to be faster. "lazy": rows without gradient stand still.
        backend: "eager": compute runs as ATen ops. "inductor": the compute between two communications is compiled into
            fused kernels; needs a C++ compiler, on CUDA Triton too.
        cluster: the links between ranks; strategies and the sizes of messages depend on them. None: they are measured
            if a step sends enough.
        plan: a plan, or the path of a saved one, to repeat: nothing is measured or decided again. None: the plan is
            made at the first call.
        memory_budget: the most that forward and backward may hold at a time, in bytes or, below 1, as a fraction of
            what they hold if everything is saved. A fraction is relaxed to the least possible. Parameters, optimizer
            state and the batch come on top. What does not fit is recomputed or offloaded, whichever costs less
            (docs/memory.md). None: everything is saved, except what the model checkpoints itself.
        broadcast_buffers: as in DDP, True: forwards read rank 0's buffers. False: each rank keeps its own. "once":
            ranks start from rank 0's buffers, as with DDP's forward_sync_buffers=False.
        spill_to: a directory for unnamed files with rows beyond `table_memory` and, for a model on the CPU with a
            memory budget, saved values. None: a CUDA model uses its host's memory; a model on the CPU spills nothing.
        route: None: the forward is captured if that pays; if it cannot be captured, it runs as written with whole
            tables (docs/from_ddp.md). "graph": a forward that cannot be captured is an error. "eager": nothing is
            captured.
        rows: the wire format of sharded tables' rows, their gradients and AllReduced gradients: "exact", or rounded to
            "bf16", "fp16" or "int8" (docs/exactness.md). Parameters are not rounded; evaluations read exact rows, and
            sparse exchanges stay exact.
        table_memory: the most memory for sharded tables and their optimizer state on this rank, in bytes or, below 1,
            as a fraction of their rows; for all tables, or by name pattern (docs/memory.md). None: no limit.
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
        return sharded or any(each in SHARDED or isinstance(each, Grid) for each in asked)

    @cached_property
    def given_plan(self) -> Plan | None:
        """The plan to use again, read from its file where a path is given.

        Raises:
            ValueError: the file holds no plan.
        """
        return self.plan if isinstance(self.plan, Plan | None) else Plan.load(self.plan)

    def agreed(self) -> str:
        """Prints the options that must agree between ranks: without folders, and a plan by its digest, not its path."""
        plan = self.given_plan
        own = replace(self, plan=None, spill_to=None if self.spill_to is None else "somewhere")
        return repr(own) + (f" and a plan of digest {plan.digest()}" if plan is not None else "")

    def check(self, where: str = "compile()") -> None:
        """Raises `ValueError` if an option has a wrong value; `where`: the call to name in the error."""
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
                "what a step holds if it saves everything."
            )
        if not isinstance(self.spill_to, str | Path | None):
            raise ValueError(f"{where}: spill_to is {self.spill_to!r}. Pass the path of a directory, or None.")
        if self.spill_to is not None and budget is None and self.table_memory is None:
            raise ValueError(
                f"{where}: spill_to is given without a limit on memory, so nothing would be spilled. Pass table_memory "
                "or memory_budget too, or leave out spill_to."
            )
        self._check_tables(where)
        check_strategy(self.strategy, where)
        if not isinstance(self.plan, Plan | str | Path | None):
            raise ValueError(
                f"{where}: plan is {self.plan!r}. Pass an embrace_fx.Plan, such as model.plan, or the path of a saved "
                "one."
            )
        if self.given_plan is not None and self.strategy != "auto":
            raise ValueError(
                f"{where}: both a plan and strategy={self.strategy!r} are given, and the plan has a strategy for each "
                "parameter. Leave one of them out."
            )
        if not isinstance(self.cluster, Cluster | None):
            raise ValueError(
                f"{where}: cluster is {self.cluster!r}. Pass an embrace_fx.Cluster with its links' bandwidth in bytes "
                "per millisecond and latency in milliseconds: Cluster(3.1e6, 0.05) is 25 Gb/s."
            )

    def _check_tables(self, where: str) -> None:
        memory: object = self.table_memory
        of_tables = list(memory.values()) if isinstance(memory, Mapping) else [] if memory is None else [memory]
        if not all(isinstance(each, int | float) and each > 0 for each in of_tables):
            raise ValueError(
                f"{where}: table_memory is {memory!r}. Pass a number of bytes, a fraction below 1, or a mapping from "
                "tables to these: 0.1 is a tenth of each table's rows; {'embedding.weight': 2**30} limits one table."
            )
        if memory is not None and self.rows != "exact":
            raise ValueError(
                f"{where}: table_memory does not work with rows={self.rows!r}, because rounding errors of gradients "
                "are kept in memory. Leave out one of them."
            )


def as_tuple(optimizer: Optimizers) -> tuple[Optimizer, ...]:
    """Puts an optimizer, or several, into a tuple, unchecked: all ranks check them together later."""
    given: Any = () if optimizer is None else optimizer
    return tuple(given) if isinstance(given, list | tuple) else (given,)
