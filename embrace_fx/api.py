"""The public surface: `compile` and the model it returns."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch.distributed as dist
from torch import nn

from embrace_fx.compiled_model import CompiledModel
from embrace_fx.cost.links import Cluster
from embrace_fx.cost.wire import Format
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.setup.options import Optimizers, Options, as_tuple
from embrace_fx.setup.telling import stage
from embrace_fx.vocabulary.exactness import RowUpdatesOption
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.schedule import ScheduleName

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile(
    model: nn.Module,
    *,
    optimizer: Optimizers = None,
    process_group: dist.ProcessGroup | None = None,
    strategy: Strategy = "auto",
    schedule: ScheduleName = "2d",
    row_updates: RowUpdatesOption = "exact",
    backend: Literal["eager", "inductor"] = "eager",
    dynamic: bool | None = None,
    cluster: Cluster | None = None,
    plan: Plan | str | Path | None = None,
    memory_budget: float | None = None,
    check_replicas: int | None = None,
    broadcast_buffers: bool = True,
    forward_sync_buffers: bool = True,
    dump_to: str | Path | None = None,
    offload_to: str | Path | None = None,
    device_mesh: DeviceMesh | None = None,
    route: Literal["graph", "eager"] | None = None,
    rows: Format = "exact",
    buckets: Format = "exact",
) -> CompiledModel:
    """Compiles a model for data-parallel training with sharded tables. Call it on every rank, as `DDP(model)`.

    The graph is captured at the first call of the result, with that call's batch. Parameters and buffers are those of
    rank 0 from here on, of embedding layers from the first call on.
    A model that is compiled already leaves the earlier `compile`, whose result is closed; the result of `compile`
    itself is returned as it is where nothing else is asked of it.

    Args:
        model: any `nn.Module`; on the meta device too, if its modules have `reset_parameters`.
        optimizer: the optimizer, or several, over the model's parameters. None: whichever steps them, made before or
            after, is adopted at its first step; given, one that needs whole tables saves planning again then.
        process_group: the ranks that train together; None: the default group as it is at the first call, or a single
            process where torch.distributed is not initialised and nothing in the environment speaks of other ranks.
        strategy: "auto", one strategy for every table, or {parameter name pattern: strategy}. "alltoall" shards a
            table, an `embrace_fx.Grid` does by rows and columns; "allreduce", "allgather", "omnireduce", "zen" and "ps"
            exchange the gradient of replicas, of any parameter that a pattern names (docs/strategies.md).
        schedule: how much of a step's communication may run into the next step. "none": nothing. "horizontal": dense
            gradients are reduced and applied until the next forward needs the parameters. "vertical": rows that the
            next batch does not read are exchanged and applied later; needs `lookahead`. "2d": both.
        row_updates: "exact": the optimizer's own semantics; where it moves rows without gradient too, all move at each
            step ("sweep" asks for it), or each takes the steps it has skipped when it is read next ("replay"),
            whichever is predicted to take less time. "lazy": rows without gradient stand still.
        backend: "eager": compute runs as ATen calls. "inductor": the compute between two communications is compiled
            into fused kernels; needs a C++ compiler, on CUDA Triton too.
        dynamic: as `torch.compile`: None: a size is dynamic from the second batch on in which it differs; True: all
            sizes are, from the first on; False: each new shape is captured for itself.
        cluster: the links between ranks, by which strategies are chosen and messages cut. None: they are probed, where
            a step sends enough for it to matter.
        plan: a plan, or the path of a saved one, that is repeated: nothing is probed or decided anew. None: the plan is
            made at the first call.
        memory_budget: the most that forward and backward may hold at a time, in bytes, or, below 1, as a fraction of
            what they hold where everything is saved, but no less than can be; parameters, optimizer state and the batch
            come on top. What does not fit is computed again in the backward, or offloaded, at the least predicted cost
            (docs/memory.md). None: everything is saved that the model does not checkpoint itself.
        check_replicas: every so many calls, ranks compare checksums of what all of them hold: a rank whose parameters,
            optimizer state or learning rate have become other ones is named (docs/operations.md). None: never.
        broadcast_buffers: as of DDP: buffers are rank 0's from compile() on. False: each rank keeps its own.
        forward_sync_buffers: as of DDP: forwards read rank 0's buffers. False: each rank goes on from those that have
            been made equal in compile().
        dump_to: a folder into which each living rank writes, when a rank is dead or stuck, what it was doing: its last
            launches, and where its threads stood. None: nothing is written.
        offload_to: with a memory budget, for a model on the CPU: a directory in which saved values may lie, in a file,
            between forward and backward. None: nothing is offloaded. A model on a GPU offloads to its host's memory.
        device_mesh: as of DDP: a mesh of one dimension, in place of the process group.
        route: None: the forward is captured as a graph; where no graph holds it, it runs as it is written, on replicas,
            with gradients exchanged as the plan says (docs/from_ddp.md). "graph": a forward that no graph holds is an
            error. "eager": nothing is captured.
        rows: the format in which sharded tables' rows and their gradients travel: "exact", as they are, or rounded to
            "bf16", "fp16" or "int8" (docs/exactness.md). Parameters stay what they are; evaluations read exact rows.
        buckets: likewise of gradients that are AllReduced; sparse exchanges of replicas stay exact.

    Raises:
        SetUpError: a ValueError and a RuntimeError: an option that does not exist; no trainable parameter; no compiler
            for "inductor"; a model, optimizer or option that differs between ranks. On every rank.
    """
    with stage("loading torch's compiler", int(os.environ.get("RANK", "0"))):  # the group's rank is not known yet
        from embrace_fx.session.session import Session  # noqa: PLC0415  (takes seconds)

    more = (
        check_replicas,
        broadcast_buffers,
        forward_sync_buffers,
        dump_to,
        offload_to,
        device_mesh,
        route,
        rows,
        buckets,
    )
    options = Options(strategy, schedule, row_updates, backend, dynamic, cluster, plan, memory_budget, *more)
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
