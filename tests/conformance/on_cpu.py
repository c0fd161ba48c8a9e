"""A rank's GPU is its CPU: what lets bodies that were written for GPUs run where there are none.

Only where tensors lie changes: `.cuda()`, `.to(rank)` and `device=` give tensors on the CPU, streams and events do
nothing, and `device_ids`, which DDP takes for GPUs alone, are left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FACTORIES = (
    "tensor",
    "ones",
    "zeros",
    "rand",
    "randn",
    "randint",
    "empty",
    "full",
    "arange",
    "ones_like",
    "zeros_like",
)


def _is_gpu(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (isinstance(value, str | torch.device) and str(value).startswith("cuda"))


def _made_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _moved_to_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(to)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if _is_gpu(each) else each for each in args)
        return _made_on_cpu(to)(self, *args, **kwargs)

    return moved


class Nothing:
    """Replaces a stream, an event or a device: entering it, recording it and waiting for it do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...


def without_devices(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `wrap` that ignores `device_ids` and `output_device`."""

    def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_ids", None)
        kwargs.pop("output_device", None)
        return wrap(module, *[each for each in args if not isinstance(each, list)], **kwargs)

    ignoring = "_set_params_and_buffers_to_ignore_for_model"  # a static method that bodies call on the class
    wrapped.__dict__[ignoring] = getattr(DistributedDataParallel, ignoring)
    return wrapped


@contextlib.contextmanager
def gpus_are_cpus() -> Iterator[None]:
    """Replaces each GPU by the CPU while a body runs."""
    with contextlib.ExitStack() as stack:
        for name in FACTORIES:
            stack.enter_context(mock.patch.object(torch, name, _made_on_cpu(getattr(torch, name))))
        for kind in (torch.Tensor, nn.Module):
            stack.enter_context(mock.patch.object(kind, "to", _moved_to_cpu(kind.to)))
            stack.enter_context(mock.patch.object(kind, "cuda", lambda self, *_, **__: self))
        for name in ("Stream", "Event", "device", "stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, Nothing))
        for name in ("set_device", "synchronize", "current_device", "current_stream", "empty_cache", "manual_seed"):
            stack.enter_context(mock.patch.object(torch.cuda, name, Nothing().nothing))
        yield
