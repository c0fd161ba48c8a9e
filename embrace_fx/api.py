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
    """Compiles a model for data-parallel training with sharded tables. Call it on every rank, as `DDP(model)`.

    The graph is captured at the first call of the result, with that call's batch. Parameters and buffers are those of
    rank 0 from here on, of embedding layers from the first call on. An earlier `compile` of the model is closed.

    Args: `embrace_fx.setup.options.Options` tells more of each.
        model: any `nn.Module`; on the meta device too, if its modules have `reset_parameters`.
        optimizer: one, or several; None: whichever steps the model is adopted at its first step.
        process_group: the ranks that train together, or a mesh of one dimension of them; None: the default group, or a
            single process.
        strategy: "auto", one strategy or grid for every table, or {parameter name pattern: strategy or grid}.
        schedule: what may run into the next step: "none", "horizontal", "vertical", "2d"; "auto": the fastest.
        row_updates: of rows without gradient: "exact" (as the optimizer does), "sweep", "replay" or "lazy".
        backend: "eager": ATen calls; "inductor": fused kernels between communications.
        cluster: the links between ranks; None: they are probed.
        plan: a plan, or the path of a saved one, that is repeated; None: it is made at the first call.
        memory_budget: the most that forward and backward may hold, in bytes, or below 1 as a fraction.
        broadcast_buffers: as of DDP; "once": in compile() alone.
        route: "graph": a forward that no graph holds is an error; "eager": nothing is captured; None: as it can be.
        rows: the format in which rows and gradients travel: "exact", "bf16", "fp16" or "int8".
        table_memory: what sharded tables may hold of this rank's memory, in bytes, or below 1 as a share; by name too.
        spill_to: a directory for rows, and on the CPU saved values, that do not fit.

    Raises:
        SetUpError: a ValueError and a RuntimeError: an option that does not exist; no trainable parameter; no compiler
            for "inductor"; a model, optimizer or option that differs between ranks. On every rank.
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
    """`stateful.state_dict()` with every sharded tensor whole, on every rank: what `torch.save` on one rank wants.

    Collective. For an optimizer, a model that contains a compiled one, an average of its weights; or a state dict.
    """
    from embrace_fx.runtime.tables.state_dicts import whole_state  # noqa: PLC0415  (DTensor takes a while to import)

    found: dict[str, Any] = whole_state(stateful if isinstance(stateful, dict) else stateful.state_dict())
    return found


def save_full_state_dict(stateful: HasState | dict[str, Any], path: str | Path) -> None:
    """The file that `torch.save(full_state_dict(stateful), path)` would write, without any rank holding a table whole.

    Collective; rank 0 writes, or, where nothing is sharded, every rank that calls it. `torch.load(path, mmap=True)`
    reads it back so that each rank takes its own columns only: `model.load_state_dict` and `optimizer.load_state_dict`
    take what it returns.
    """
    from embrace_fx.runtime.tables.whole_files import write_whole  # noqa: PLC0415  (DTensor takes a while to import)

    write_whole(stateful if isinstance(stateful, dict) else stateful.state_dict(), Path(path))
