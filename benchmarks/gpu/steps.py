"""One GPU: a training step of each system on each lab model, in turn; whether the host waits in the steady step."""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist

from benchmarks.gpu.section import Context, ratio
from benchmarks.gpu.training import Running, take_turns
from benchmarks.models import MODELS

ORDER = ("lm", "transformer", "recommender", "bert", "gnmt")
"""The models, the one that the targets are about first."""
TARGET = 1.02
TARGETS = {"embrace eager": "eager", "embrace inductor": "torch.compile"}
"""What a system's step is compared with, and what it may be of that at most."""
SYSTEMS = ("eager", "ddp", "embrace eager", "torch.compile", "embrace inductor")
NEEDED_S = {"torch.compile": 25.0, "embrace inductor": 25.0}
"""About what the first step takes where it compiles."""


def run(context: Context) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    dist.init_process_group("cpu:gloo,cuda:nccl" if context.device.is_real else "gloo", rank=0, world_size=1)
    try:
        for model in ORDER:
            if not context.affords(15.0, model):
                return
            _measure(context, model)
            gc.collect()
            if context.device.is_real:
                torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()


def _measure(context: Context, model: str) -> None:
    device, sizes = context.device, context.sizes
    workload = MODELS[model][sizes.model]
    running: dict[str, Running] = {}
    for system in SYSTEMS:
        if context.affords(NEEDED_S.get(system, 5.0), f"{model}, {system}"):
            device.reset_peak()
            running[system] = Running(device, system, workload)
            running[system].window_ms(2)  # warm-up
            context.add(
                kind="start",
                model=model,
                system=system,
                first_step_s=running[system].first_step_s,
                peak_bytes=device.peak_bytes(),  # the peak of all systems so far: subtract that of the previous line
            )
    found = take_turns(running, sizes.steps, sizes.rounds)
    for system, ms in found.items():
        against = TARGETS.get(system)
        of = ratio(ms, found[against]) if against in found else None
        context.add(
            kind="step",
            model=model,
            system=system,
            ms=ms,
            against=against,
            ratio=of,
            target_met=of <= TARGET if device.is_real and of is not None else None,
        )
    for system in set(running) & set(TARGETS):
        context.add(kind="host waits", model=model, system=system, found=_host_wait(context, running[system]))


def _host_wait(context: Context, running: Running) -> str | None:
    """Returns the first place at which the host waits for the device in a steady step, or None."""
    context.device.synchronize()
    try:
        with context.device.no_host_sync():
            running.step()
    except RuntimeError as error:
        frames = _own_frames(error)
        return f"{error} at {' < '.join(frames)}"
    return None


def _own_frames(error: BaseException) -> list[str]:
    found = []
    at = error.__traceback__
    while at is not None:
        found.append(f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}")
        at = at.tb_next
    return found[::-1][:4]
