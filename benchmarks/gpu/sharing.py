"""Several processes share the one GPU over gloo: the same losses as DDP's, and how much communication is hidden.

Processes take turns on a GPU that they share, and gloo copies through the host: these times compare with nothing.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from benchmarks.gpu.device import open_device
from benchmarks.gpu.section import Context
from benchmarks.gpu.training import Running
from benchmarks.models import MODELS

STEPS = 15
"""Past the steps that are profiled, after which the order is kept."""
TOLERANCE = 1e-3


def run(context: Context) -> None:
    for processes in context.sizes.processes:
        if not context.affords(25.0, f"{processes} processes"):
            return
        with tempfile.TemporaryDirectory() as directory:
            arguments = (processes, Path(directory), not context.device.is_real)
            spawned = spawn(_rank, arguments, nprocs=processes, join=False)
            results: Any = spawned
            while not results.join(context.left_s()):
                if context.left_s() <= 0:
                    raise TimeoutError(f"{processes} processes did not finish in time")
            found = [_read(Path(directory) / f"{rank}") for rank in range(processes)]
        for schedule in ("none", "2d"):
            pairs = [pair for each in found for pair in zip(each[schedule], each["ddp"], strict=True)]
            difference = max(abs(own - other) / abs(other) for own, other in pairs)
            context.add(
                kind="parity",
                processes=processes,
                schedule=schedule,
                against="ddp",
                difference=difference,
                tolerance=TOLERANCE,
                passed=difference <= TOLERANCE,
            )
        context.add(kind="overlap", processes=processes, **found[0]["overlap"])


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _rank(rank: int, processes: int, directory: Path, dry_run: bool) -> None:
    device = open_device(dry_run)
    store = FileStore(str(directory / "store"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    workload = MODELS["lm"]["tiny" if dry_run else "lab"]
    found: dict[str, Any] = {}
    for name, system in {"ddp": "ddp", "none": "embrace none", "2d": "embrace 2d"}.items():
        running = Running(device, system, workload, rank)
        for _ in range(STEPS):
            running.step()
        found[name] = [float(loss) for loss in running.losses]
    found["overlap"] = running.overlap(3)
    (directory / f"{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
