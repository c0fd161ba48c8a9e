"""Finds the process group that a model trains on, and raises if it has changed or cannot be used."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def default_group() -> dist.ProcessGroup | None:
    """Returns the current default group, or None if torch.distributed is not initialized."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Returns the process group of a one-dimensional mesh, or None for other meshes."""
    return mesh.get_group() if mesh.ndim == 1 else None


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Raises `ValueError` if a mesh has several dimensions. The text of the error is DDP's, because some training loops
    compare it.
    """
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"Only 1D device mesh is supported, but this one has {mesh.ndim} dimensions. Pass the dimension along "
            "which batches differ: mesh['name']."
        )


def check_group(now: dist.ProcessGroup | None, compiled_in: dist.ProcessGroup | None) -> None:
    """Checks that the first call of a model trains with all ranks of the job.

    Args:
        now: the default process group at the first call.
        compiled_in: the default process group when `compile` was called.

    Raises:
        RuntimeError: WORLD_SIZE is above 1 but there is no group, or the group is not the one in which `compile` was
            called.
    """
    if now is None and compiled_in is None and (ranks := _launched_ranks()) > 1:
        raise RuntimeError(
            f"torch.distributed is not initialized, but WORLD_SIZE is {ranks}, so each rank would train alone. Call "
            "torch.distributed.init_process_group() before the first call of the model, or unset WORLD_SIZE to train "
            "in a single process."
        )
    if compiled_in is not None and now is not compiled_in:
        raise RuntimeError(
            "The process group in which compile() was called has been destroyed or replaced. Call "
            "init_process_group() only once, or compile the model again after each call."
        )


def check_call(group: dist.ProcessGroup | None, *, begun: bool) -> None:
    """Checks that a model can be called.

    Args:
        group: the process group of the ranks that train together.
        begun: whether the model has been called before.

    Raises:
        RuntimeError: the call is in a distributed autograd context, or torch.distributed was initialized after the
            first call.
    """
    _refuse_distributed_autograd()
    if begun and group is None and (now := default_group()) is not None and dist.get_world_size(now) > 1:
        raise RuntimeError(
            "torch.distributed was initialized after the model's first call, so this model trains in a single "
            "process. Call init_process_group() before the first call of the model, or compile the model again."
        )


def _refuse_distributed_autograd() -> None:
    """Raises `RuntimeError` inside a distributed autograd context, because its backward would not find the
    gradients.
    """
    rpc = sys.modules.get("torch.distributed.rpc")
    if rpc is None or not rpc.is_available() or not rpc.api._is_current_rpc_agent_set():
        return
    autograd: Any = torch.distributed.autograd
    try:
        autograd._current_context()
    except RuntimeError:  # torch raises if no distributed autograd context is active
        return
    raise RuntimeError(
        "The model was called inside torch.distributed.autograd.context(), but its gradients are stored in .grad, not "
        "in that context. Call the model outside of the context, and use loss.backward()."
    )


def _launched_ranks() -> int:
    """Returns the number of ranks that the launcher (such as torchrun) has set in WORLD_SIZE, or 1 if it is not set."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1
