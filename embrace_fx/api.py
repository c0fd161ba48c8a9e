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

    The graph is captured at the first call of the compiled model, with that call's batch. All ranks get rank 0's
    parameters and buffers: those of embedding layers at the first call, all others immediately. If the same model is
    compiled again, the earlier compiled model is closed.

    Args:
        model: any `nn.Module`. It may be on the meta device if its modules have `reset_parameters`.
        optimizer: the optimizer, or a sequence of optimizers. None: the optimizers of the model's parameters are
            detected at their first step.
        process_group: the ranks that train together, as a process group or a one-dimensional device mesh. None: the
            default group, or a single process if there is none.
        strategy: "auto", one strategy for all tables, or a mapping from parameter name patterns to strategies.
            "alltoall" shards a table by columns, an `embrace_fx.Grid` by rows and columns. "allreduce" and the other
            strategies (docs/strategies.md) keep a parameter whole on every rank and exchange its gradient. A pattern
            may also match parameters that are not tables.
        schedule: how far a step's communication may run into the next step. "none": not at all. "horizontal": dense
            gradients are reduced and applied until the next forward reads the parameters. "vertical": gradients of
            table rows that the next batch does not read may be exchanged and applied later; needs `lookahead`. "2d":
            both. "auto": the schedule that is predicted to be fastest, or "2d" if the links are not known.
        row_updates: how the optimizer updates table rows without a gradient. "exact": as it does on a plain model; if
            it changes such rows, "sweep" or "replay" is chosen, whichever is predicted to be faster. "sweep": each step
            updates all rows. "replay": when a row is next read, the updates that it has missed are applied. "lazy":
            rows without a gradient do not change.
        backend: "eager": compute runs as ATen ops. "inductor": the compute between two communications is compiled into
            fused kernels, which requires a C++ compiler, and on CUDA also Triton.
        cluster: the links between ranks, on which strategies and message sizes depend. None: the links are measured if
            a step sends enough data.
        plan: a plan, or the path of a saved one, to use again without measuring or deciding anything. None: the plan is
            made at the first call.
        memory_budget: the maximum memory of forward and backward at any time, in bytes or, if below 1, as a fraction of
            what they need if everything is saved. A fraction that is too small is raised to the smallest possible one.
            Parameters, optimizer state and the batch are not included. Values that do not fit are recomputed or
            offloaded, whichever is predicted to be faster (docs/memory.md). None: everything is saved, except what the
            model itself checkpoints.
        broadcast_buffers: True: forwards use rank 0's buffers, as in DDP. False: each rank keeps its own buffers.
            "once": ranks start from rank 0's buffers, as with DDP's `forward_sync_buffers=False`.
        route: "graph": the forward is captured; an error is raised if this fails. "eager": the forward runs eagerly,
            and nothing is captured. None: the forward is captured if this is predicted to make training faster. If it
            cannot be captured, it runs eagerly, with whole tables (docs/from_ddp.md).
        rows: the format in which rows of sharded tables, their gradients, and AllReduced gradients are sent: "exact",
            or rounded to "bf16", "fp16" or "int8" (docs/exactness.md). Parameters are not rounded, evaluations read
            exact rows, and sparse exchanges stay exact.
        table_memory: the maximum memory for sharded tables and their optimizer state on this rank, in bytes or, if
            below 1, as a fraction of their rows. Pass one value for all tables, or a mapping from name patterns to
            values (docs/memory.md). None: no limit.
        spill_to: a directory for temporary files. They store table rows that exceed `table_memory` and, if a model on
            the CPU has a `memory_budget`, values saved for the backward. None: a CUDA model uses its host's memory, and
            a model on the CPU spills nothing.

    Raises:
        SetUpError: an option is unknown; the model has no trainable parameter; the compiler that "inductor" needs is
            missing; or model, optimizer or options differ between ranks. Raised on every rank. It is both a ValueError
            and a RuntimeError.
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

    Save the result with `torch.save` on one rank.

    Args:
        stateful: an optimizer; a compiled model, a module that contains one, or an `AveragedModel` of one; or a state
            dict.
    """
    from embrace_fx.runtime.tables.state_dicts import gather_state_dict  # noqa: PLC0415  (DTensor takes a while to import)

    found: dict[str, Any] = gather_state_dict(stateful if isinstance(stateful, dict) else stateful.state_dict())
    return found


def save_full_state_dict(stateful: HasState | dict[str, Any], path: str | Path) -> None:
    """Writes the same file as `torch.save(full_state_dict(stateful), path)`, but no rank needs memory for a whole
    table. Collective.

    Rank 0 writes the file. If nothing is sharded, every calling rank writes it. Load the file with `torch.load(path,
    mmap=True)` and pass the result to `load_state_dict`: each rank then reads only its own columns.
    """
    from embrace_fx.runtime.tables.state_dicts import save_gathered  # noqa: PLC0415  (DTensor takes a while to import)

    save_gathered(stateful if isinstance(stateful, dict) else stateful.state_dict(), Path(path))
