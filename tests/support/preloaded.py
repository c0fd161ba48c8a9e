"""Does once for all ranks what takes long: the imports of tests, and a first capture. The fork server's `PRELOAD`."""

from __future__ import annotations

import gc
import importlib

gc.disable()  # imports create no garbage; each rank enables collection again

for _name in (
    *("torch.distributed", "torch.distributed.tensor", "torch._dynamo", "torch.profiler"),
    *("torch._inductor.sizevars", "torch._dynamo.backends.inductor", "torch.distributed.tensor.experimental"),
    *("torch._dynamo.testing", "torch.export._trace", "sympy.combinatorics"),
    *("embrace_fx.session.session", "embrace_fx.api", "pytest", "hypothesis"),
):
    importlib.import_module(_name)

import torch  # noqa: E402  (whose import is slow while the collector runs)

from embrace_fx.capture import capture  # noqa: E402

if torch.version.cuda is None:  # with CUDA, autograd would start threads, but this process will fork
    importlib.import_module("tqdm").tqdm.monitor_interval = 0  # stops tqdm from starting a thread
    capture(torch.nn.Linear(1, 1), (torch.ones(1, 1),), {}, train=True)
    torch.compiler.reset()
