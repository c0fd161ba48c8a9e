"""Program: every kernel compiled for an H200 (sm_90), as its launcher would, on a machine without a GPU.

    python -m tests.support.kernel_compilation

Prints JSON: kernel -> of each of its compilations, how often each width of access to global memory occurs in its PTX.
Nothing is run: launches return at once, and what they should have written is not there.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from embrace_fx.runtime.kernels import decay, gpu


class _NoDevice:
    """What the just-in-time compiler asks of a driver."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> dict[str, list[dict[str, int]]]:
    driver.set_active(_NoDevice())
    found: dict[str, list[dict[str, int]]] = defaultdict(list)
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        ptx = launch(self, *args, grid=grid, warmup=True, **kwargs).asm["ptx"]
        found[self.fn.__name__].append(Counter(re.findall(r"(?:ld|st|atom|red)\.global[\w.:]*", ptx)))

    JITFunction.run = compile_only
    for dtype, width in [
        (torch.float32, 512),
        (torch.bfloat16, 512),
        (torch.float32, 400),
        (torch.float32, 33),
        (torch.float32, 1),
    ]:
        _call_all(torch.zeros(64, width, dtype=dtype))
    _call_all(torch.zeros(64, 512, dtype=torch.float64))
    return found


def _call_all(table: torch.Tensor) -> None:
    ids, rows = torch.arange(40), table[:40]
    gpu.unpack_columns(gpu.pack_columns(rows, 4), rows, 4, ids)
    gpu.coalesce(ids, rows.reshape(-1), rows.shape[1], (), 0.5)
    gpu.sgd_rows(table, table, ids, rows, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, maximize=True)
    gpu.adagrad_rows(table, table, ids, rows, step_size=0.1, eps=1e-8, weight_decay=0.1, maximize=True)
    for most in (None, table):
        if table.dtype != torch.bfloat16:  # whose tables are swept
            history = decay.TakenSteps(torch.zeros(9, decay.COLUMNS, dtype=torch.float64), 8, 0.1, 1e-8, 0.9)
            gpu.decay_rows(table, decay.Averages(table, table, most), ids, torch.zeros(64, dtype=torch.int32), history)
        gpu.adam_rows(
            table, table, table, most, ids, rows, step_size=0.1, betas=(0.9, 0.99), eps=1e-8, correction=1.0, shrink=0.5
        )


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
