"""The five lab models on the device against the same training on the CPU, plain PyTorch in float32."""

from __future__ import annotations

import torch

from benchmarks.gpu.device import CpuStandIn
from benchmarks.gpu.section import Context
from benchmarks.gpu.training import Running
from benchmarks.models import MODELS

STEPS = 8
TOLERANCE = 1e-3
"""Of a loss, relative: after a few steps, two devices' roundings in float32. In the dry run it is the CPU's own."""
COMPILED = ("lm", "transformer")
"""Models that are trained under the inductor back end too: compiling takes seconds for each."""


def run(context: Context) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    for model, sizes in MODELS.items():
        workload = sizes["tiny"]
        expected = _losses(Running(CpuStandIn(), "eager", workload, on_host=True))
        for system in ("embrace eager", "embrace inductor") if model in COMPILED else ("embrace eager",):
            if not context.affords(10.0, f"{model}, {system}"):
                return
            found = _losses(Running(context.device, system, workload, on_host=True))
            difference = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
            context.add(
                kind="parity",
                model=model,
                system=system,
                difference=difference,
                tolerance=TOLERANCE,
                passed=difference <= TOLERANCE,
            )


def _losses(running: Running) -> list[float]:
    for _ in range(STEPS):
        running.step()
    return [float(loss) for loss in running.losses]
