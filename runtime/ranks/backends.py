"""Finds out which devices and timeouts the backends of a process group have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")


def group_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Returns the timeout of a process group, or None if its backend does not report it."""
    backend = group._get_backend(CPU if supports_device(group, CPU) else torch.device("cuda"))
    found: timedelta | None = getattr(backend.options, "_timeout", None)
    return found


def supports_device(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns whether a process group has a backend for tensors of a device."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def goes_through_host(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Returns whether a tensor must be copied to the host before the group can send it. This is so for a CUDA tensor
    over gloo.
    """
    return tensor.is_cuda and "nccl" not in backend_name(group, tensor.device)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns the name of a group's backend for a device."""
    return group._get_backend(torch.device(device.type)).name()


@contextlib.contextmanager
def setup_collectives(device: torch.device) -> Iterator[None]:
    """Opens a context for collectives on a CUDA device outside of a training step. Synchronizes the device on entry and
    on exit, so that these collectives do not run concurrently with those of other models.
    """
    torch.cuda.synchronize(device)
    yield
    torch.cuda.synchronize(device)
