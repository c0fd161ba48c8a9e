"""Imports, once for all ranks, the modules of a first capture and of tests: the fork server's `PRELOAD`."""

from __future__ import annotations

import gc
import importlib

gc.disable()  # a rank enables it: what is imported here stays

for _name in (
    *("torch.distributed", "torch.distributed.tensor", "torch._dynamo", "torch.profiler"),
    *("torch._inductor.sizevars", "torch._dynamo.backends.inductor", "torch.distributed.tensor.experimental"),
    *("torch._dynamo.testing", "torch.export._trace", "sympy.combinatorics"),
    *("embrace_fx.session.session", "embrace_fx.api", "pytest"),
):
    importlib.import_module(_name)
