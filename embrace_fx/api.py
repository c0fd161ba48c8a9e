"""The public surface: `compile` and the model it returns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch.distributed as dist
from torch import nn

from embrace_fx.compiled_model import CompiledModel
from embrace_fx.cost.links import Cluster
from embrace_fx.cost.wire import Format
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.setup.log import stage
from embrace_fx.setup.options import Optimizers, Options, as_tuple
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import ScheduleOption

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile(
    model: nn.Module,
    *,
    optimizer: Optimizers = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    strategy: Strategy = "auto",
    schedule: ScheduleOption = "auto",
    row_updates: RowUpdatesOption = "exact",
    backend: Literal["eager", "inductor"] = "eager",
    cluster: Cluster | None = None,
    plan: Plan | str | Path | None = None,
    memory_budget: float | None = None,
    broadcast_buffers: bool | Literal["once"] = True,
    route: Literal["graph", "eager"] | None = None,
    rows: Format = "exact",
    table_memory: float | Mapping[str, float] | None = None,
    spill_to: str | Path | None = None,
) -> CompiledModel:
    """Compiles a model for data-parallel training with sharded tables. Call it on every rank, like `DDP(model)`.

    The graph is captured at the first call of the result, with that call's batch. Parameters and buffers take rank 0's
    values now, embedding layers at the first call. A second `compile` of the same model closes the first result.

    Args:
        model: any `nn.Module`. It may be on the meta device if its modules have `reset_parameters`.
        optimizer: one, or several. None: the optimizers that step the model's parameters are found at the first step.
        process_group: the ranks that train together: a group, or a one-dimensional mesh. None: the default group, or a
            single process.
        strategy: "auto", one strategy for every table, or {parameter name pattern: strategy}. "alltoall" shards a table
            by columns, an `embrace_fx.Grid` by rows and columns. "allreduce" and the others (docs/strategies.md) keep a
            parameter whole and exchange its gradient; a pattern may name any parameter.
        schedule: how far a step's communication may run into the next step. "none": not at all. "horizontal": dense
            gradients are reduced and applied until the next forward reads the parameters. "vertical": rows that the
            next batch does not read are exchanged and applied later; needs `lookahead`. "2d": both. "auto": the
            fastest by prediction, and "2d" if the links are not known.
        row_updates: "exact": the optimizer's own semantics. If the optimizer changes rows without a gradient, "sweep"
            or "replay" is chosen, whichever is predicted to be faster. "sweep": each step updates all rows. "replay":
            when a row is next read, it applies the steps that it has skipped. "lazy": rows without a gradient do not
            change.
        backend: "eager": compute runs as ATen ops. "inductor": the compute between two communications is compiled into
            fused kernels; needs a C++ compiler, on CUDA Triton too.
        cluster: the links between ranks; strategies and the sizes of messages depend on them. None: they are measured
            if a step sends enough.
        plan: a plan, or the path of a saved one, to repeat: nothing is measured or decided again. None: the plan is
            made at the first call.
        memory_budget: the maximum that forward and backward may hold at a time, in bytes or, below 1, as a fraction of
            what they hold if everything is saved. A fraction that cannot be met is relaxed to the smallest possible.
            Parameters, optimizer state and the batch are not included. Values that do not fit are recomputed or
            offloaded, as is predicted to be faster (docs/memory.md). None: everything is saved, except what the model
            checkpoints itself.
        broadcast_buffers: as in DDP, True: forwards read rank 0's buffers. False: each rank keeps its own. "once":
            ranks start from rank 0's buffers, as with DDP's forward_sync_buffers=False.
        route: None: the forward is captured if that pays; if it cannot be captured, it runs as written with whole
            tables (docs/from_ddp.md). "graph": a forward that cannot be captured is an error. "eager": nothing is
            captured.
        rows: the wire format of sharded tables' rows, their gradients and AllReduced gradients: "exact", or rounded to
            "bf16", "fp16" or "int8" (docs/exactness.md). Parameters are not rounded; evaluations read exact rows, and
            sparse exchanges stay exact.
        table_memory: the maximum memory for sharded tables and their optimizer state on this rank, in bytes or, below
            1, as a fraction of their rows; for all tables, or by name pattern (docs/memory.md). None: no limit.
        spill_to: a directory for unnamed files with rows beyond `table_memory` and, for a model on the CPU with a
            memory budget, saved values. None: a CUDA model uses its host's memory; a model on the CPU spills nothing.

    Raises:
        SetUpError: a ValueError and RuntimeError, on every rank: an unknown option; no trainable parameter; no compiler
            for "inductor"; a model, optimizer or option that differs between ranks.
    """
    # Read the rank from the environment: torch.distributed may not be initialized yet.
    with stage("loading torch's compiler", int(os.environ.get("RANK", "0"))):
        from embrace_fx.session.session import Session  # noqa: PLC0415  (takes seconds)

    options = Options(
        strategy=strategy,
        schedule=schedule,
        row_updates=row_updates,
        backend=backend,
        cluster=cluster,
        plan=plan,
        memory_budget=memory_budget,
        broadcast_buffers=broadcast_buffers,
        route=route,
        rows=rows,
        table_memory=table_memory,
        spill_to=spill_to,
    )
    optimizers = as_tuple(optimizer)
    if isinstance(model, CompiledModel) and model._has_options(options, optimizers, process_group):
        return model
    session = Session(model, optimizers, process_group, options)
    return CompiledModel(session, single=not isinstance(optimizer, list | tuple))


class HasState(Protocol):
    """Any object with a `state_dict` method, such as a module or an optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as a dict."""


def full_state_dict(stateful: HasState | dict[str, Any]) -> dict[str, Any]:
    """Returns `stateful.state_dict()` with whole tensors in place of shards, on every rank. Collective.

    Save it with `torch.save` on one rank.

    Args:
        stateful: an optimizer, a compiled model or a module that contains one, an `AveragedModel` of it, or a state
            dict.
    """
    from embrace_fx.runtime.tables.state_dicts import gather_state_dict  # noqa: PLC0415  (DTensor takes a while to import)

    found: dict[str, Any] = gather_state_dict(stateful if isinstance(stateful, dict) else stateful.state_dict())
    return found


def save_full_state_dict(stateful: HasState | dict[str, Any], path: str | Path) -> None:
    """Writes what `torch.save(full_state_dict(stateful), path)` would, without any rank holding a whole table.
    Collective.

    Rank 0 writes. If nothing is sharded, every calling rank writes. Load the file with `torch.load(path, mmap=True)`
    and pass it to `load_state_dict`: each rank then reads only its own columns.
    """
    from embrace_fx.runtime.tables.whole_files import save_gathered  # noqa: PLC0415  (DTensor takes a while to import)

    save_gathered(stateful if isinstance(stateful, dict) else stateful.state_dict(), Path(path))
