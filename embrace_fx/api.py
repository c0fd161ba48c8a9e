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

    Args: (`embrace_fx.setup.options.Options` has the details)
        model: any `nn.Module`. It may be on the meta device if its modules have `reset_parameters`.
        optimizer: one, or several. None: the optimizers that step the model's parameters are found at the first step.
        process_group: the ranks that train together: a group, or a one-dimensional mesh. None: the default group, or a
            single process.
        strategy: "auto", one strategy or grid for every table, or {parameter name pattern: strategy or grid}.
        schedule: how far communication may run into the next step: "none", "horizontal", "vertical", "2d", or "auto",
            the fastest by prediction.
        row_updates: how rows without gradient are updated: "exact" (as the optimizer does), "sweep", "replay", "lazy".
        backend: "eager" runs ATen ops; "inductor" fuses kernels between communications.
        cluster: the links between ranks. None: they are measured.
        plan: a plan, or the path of a saved one, to repeat. None: it is made at the first call.
        memory_budget: the most that forward and backward may hold, in bytes or, below 1, as a fraction.
        broadcast_buffers: as in DDP; "once": only in compile().
        route: "graph" raises if the forward cannot be captured; "eager" never captures; None captures if that pays.
        rows: the wire format of rows and gradients: "exact", "bf16", "fp16" or "int8".
        table_memory: the most memory for sharded tables on this rank, in bytes or, below 1, as a share; or by name.
        spill_to: a directory for rows, and on the CPU for saved values, that do not fit.

    Raises:
        SetUpError: a ValueError and RuntimeError, on every rank: an unknown option; no trainable parameter; no compiler
            for "inductor"; a model, optimizer or option that differs between ranks.
    """
    with stage("loading torch's compiler", int(os.environ.get("RANK", "0"))):  # the group's rank is not known yet
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
    if isinstance(model, CompiledModel) and model._is_as_asked(options, optimizers, process_group):
        return model
    session = Session(model, optimizers, process_group, options)
    return CompiledModel(session, single=not isinstance(optimizer, list | tuple))


class HasState(Protocol):
    """Anything with a state dict: a module, an optimizer."""

    def state_dict(self) -> dict[str, Any]: ...


def full_state_dict(stateful: HasState | dict[str, Any]) -> dict[str, Any]:
    """Returns `stateful.state_dict()` with whole tensors in place of shards, on every rank. Collective.

    Save it with `torch.save` on one rank. Takes an optimizer, a module that contains a compiled model, an average of
    its weights, or a state dict.
    """
    from embrace_fx.runtime.tables.state_dicts import whole_state  # noqa: PLC0415  (DTensor takes a while to import)

    found: dict[str, Any] = whole_state(stateful if isinstance(stateful, dict) else stateful.state_dict())
    return found


def save_full_state_dict(stateful: HasState | dict[str, Any], path: str | Path) -> None:
    """Writes what `torch.save(full_state_dict(stateful), path)` would, but no rank holds a whole table. Collective.

    Rank 0 writes; if nothing is sharded, every rank that calls it does. Load the file with
    `torch.load(path, mmap=True)` and pass it to `load_state_dict`: each rank then reads only its own columns.
    """
    from embrace_fx.runtime.tables.whole_files import write_whole  # noqa: PLC0415  (DTensor takes a while to import)

    write_whole(stateful if isinstance(stateful, dict) else stateful.state_dict(), Path(path))
