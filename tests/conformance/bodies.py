"""The bodies of torch's own DDP tests, each run on ranks with DDP, or with embrace_fx.compile in DDP's place."""

from __future__ import annotations

import inspect
import os
import tempfile
import unittest
import warnings
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_utils import TestCase

import embrace_fx
from tests.conformance.on_cpu import gpus_are_cpus, without_devices

WORLD_SIZE = 2

# torch's module reads these variables on import. Unset them afterwards, because this process is no rank.
with mock.patch.dict(os.environ, {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD_SIZE)}), warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's module still uses TorchScript
    from torch.testing._internal.distributed import distributed_test

Side = Literal["DDP", "embrace_fx"]

BASE = distributed_test.DistributedTest._DistTestBase

SPEED_ALONE = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "gradient_as_bucket_view",
    "batched_grad_copy",
    "find_unused_parameters",
    "skip_all_reduce_unused_params",
    "static_graph",
    "check_reduction",
)
"""Options of DDP that say how it gets to its result: what is asked of `compile` is that result."""


def names() -> list[str]:
    """Returns the names of the tests whose bodies use DDP, directly or through helpers."""
    return sorted(name for name in dir(BASE) if name.startswith("test_") and _is_about_ddp(getattr(BASE, name)))


def _is_about_ddp(test: Callable[..., Any], seen: frozenset[str] = frozenset()) -> bool:
    code = inspect.unwrap(test).__code__
    read = set(code.co_names).union(*(c.co_names for c in code.co_consts if inspect.iscode(c)))
    if "DistributedDataParallel" in read:
        return True
    helpers = {name for name in read if name.startswith(("_test", "_run"))} - seen
    return any(_is_about_ddp(getattr(BASE, name), seen | helpers) for name in helpers if hasattr(BASE, name))


def in_ddps_place(module: nn.Module, **options: Any) -> embrace_fx.CompiledModel:
    """Calls `embrace_fx.compile` with the arguments of DDP."""
    kept = {name: value for name, value in options.items() if name not in SPEED_ALONE}
    if "device_mesh" in kept:
        kept["process_group"] = kept.pop("device_mesh")
    if kept.pop("forward_sync_buffers", True) is False:
        kept["broadcast_buffers"] = "once"
    return embrace_fx.compile(module, **kept)


class Rank(BASE, TestCase):
    """The object that the body of a test receives as `self`."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__("run")  # type: ignore[no-untyped-call]
        self.rank = rank
        self.world_size = world_size

    def _barrier(self, *_: Any, **__: Any) -> None:
        dist.barrier()


def run_body(rank: int, world_size: int, name: str, side: Side) -> str:
    """Runs one body on this rank; returns "" or why torch itself skips it."""
    warnings.simplefilter("ignore")
    os.environ |= {"TEMP_DIR": tempfile.gettempdir(), "WORLD_SIZE": str(WORLD_SIZE)}  # set only in these ranks
    wrap = without_devices(DistributedDataParallel if side == "DDP" else in_ddps_place)
    body = inspect.unwrap(getattr(BASE, name))
    with (
        gpus_are_cpus(),
        mock.patch.object(nn.parallel, "DistributedDataParallel", wrap),
        mock.patch.object(distributed_test, "DistributedDataParallel", wrap, create=True),
        mock.patch.object(distributed_test, "init_multigpu_helper", lambda size, _: {r: [r] for r in range(size)}),
    ):
        try:
            torch.manual_seed(0)
            body(Rank(rank, world_size))
        except (unittest.SkipTest, SystemExit) as skipped:
            return f"skipped: {skipped}"
    return ""
