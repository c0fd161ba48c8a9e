"""What a test of a device needs, and how it trains there."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import embrace_fx
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.schedule import ScheduleName
from tests.support.models import Workload
from tests.support.training import SEED, make_optimizers

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

STEPS = 20
"""Beyond the twelfth, from which on the order follows a profile of the device."""


def gpus(count: int) -> Decorator:
    """Skips a test on machines with fewer GPUs."""
    found = torch.cuda.device_count()
    return pytest.mark.skipif(found < count, reason=f"needs {count} GPU(s), found {found}")


emulated = pytest.mark.skipif(not os.environ.get("EMULATED_CUDA_FINDINGS"), reason="needs emulated devices")


def ends(module: str, timeout_s: float, **variables: str) -> str:
    """Runs a test program with additional environment variables. Returns the last line that the program prints."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "cwd": Path(__file__).parents[2]}
    ended = subprocess.run(
        [sys.executable, "-m", module], env=os.environ | variables, timeout=timeout_s, check=False, **how
    )
    assert ended.returncode == 0, ended.stderr
    return "".join(ended.stdout.splitlines()[-1:])


def findings_of(path: Path) -> str:
    """Returns the errors that an emulated device has recorded in a file."""
    text = path.read_text(encoding="utf-8")
    path.unlink()
    return text


def set_sync_debug_mode(mode: str) -> None:
    """Calls `torch.cuda.set_sync_debug_mode`, without the warning that the mode is experimental."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode(mode)


def host_waits() -> tuple[int, int, int]:
    """Returns how often the host waited for streams, events and copies of emulated devices: zeros on real ones."""
    found = (ctypes.c_long * 3)()
    if "EMULATED_CUDA_FINDINGS" in os.environ:
        ctypes.CDLL("libcudart.so.13").emulated_cuda_host_waits(found)
    return found[0], found[1], found[2]


def trains_on_gpu(
    rank: int,
    world_size: int,
    workload: Workload,
    schedule: ScheduleName,
    backend: str,
    gpus_used: int,
    strict_from: int | None = None,
) -> dict[str, Tensor]:
    """Trains on the rank's GPU, as a user would; returns the parameters, on the host.

    Args:
        backend: of the process group: "nccl", "cpu:gloo,cuda:nccl", or "gloo", by which ranks can share a GPU.
        gpus_used: rank r trains on GPU r modulo these.
        strict_from: from this step on, any wait of the host for the device is an error.
    """
    device = torch.device("cuda", rank % gpus_used)
    torch.cuda.set_device(device)
    group = dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)
    model = workload.make(torch.float64, seed=SEED + rank).to(device)
    optimizers = make_optimizers("adagrad", model)
    compiled = embrace_fx.compile(
        model,
        optimizer=optimizers,
        process_group=group if world_size > 1 else None,
        strategy="alltoall",
        schedule=schedule,
    )
    before = host_waits()
    loaded = [_to(workload.batches(step, rank, SEED), device) for step in range(STEPS)]
    for step, batch in enumerate(compiled.lookahead(loaded)):
        if step == strict_from:
            set_sync_debug_mode("error")
            before = host_waits()
        compiled(*batch).backward()
        for each in compiled.optimizer:
            each.step()
            each.zero_grad()
        if strict_from is not None and step == STEPS - 2:  # the last step has no next batch, so it is not measured
            set_sync_debug_mode("default")
            streams, events, copies = (now - then for now, then in zip(host_waits(), before, strict=True))
            assert streams == copies == 0
            # Two per step: for the next batch's sizes, and for the finite flag.
            assert events <= 2 * (step + 1 - strict_from)
    shown = compiled.state_dict()  # the state dict also has a tied table's second name
    return {name: _whole(shown[name].detach(), world_size) for name, _ in compiled.named_parameters()}


def _whole(value: Tensor, world_size: int) -> Tensor:
    """Returns a parameter on the CPU. Shards are gathered over the default group, which must be gloo."""
    if not isinstance(value, TableShard):
        return value.cpu()
    columns: list[Any] = [None] * world_size
    dist.all_gather_object(columns, value.to_local().cpu())
    return torch.cat(columns, dim=1)


def _to(batch: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    return tuple(each.to(device) for each in batch)
