"""Program: models on CUDA under backend="inductor", whose regions are compiled to cubins, and computed by eager ops.

    python -m tests.gpu.compiled      (with tests.support.emulated_cuda's environment, and as test_compiled.py sets it)

Capture, planning, passes and lowering see CUDA; Inductor writes Triton for sm_90, Triton compiles it, ptxas assembles
it. No such kernel can run on an emulated device. Prints a JSON object: by model and precision, how many regions there
are, how many cubins were made for them, and how far parameters are from those of the plain model on the same device.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.runtime.kernels import gpu
from embrace_fx.runtime.lower import inductor
from embrace_fx.runtime.lower.regions import Region
from tests.gpu.matrix import WORKLOADS
from tests.support.training import SEED, make_optimizers

STEPS = 2


def trained(model: nn.Module, call: Callable[..., Tensor], name: str, narrow: bool) -> dict[str, Tensor]:
    (optimizer,) = make_optimizers("sgd", model)
    for step in range(STEPS):
        batch = [each.cuda() for each in WORKLOADS[name].batches(step, 0, SEED)]
        with torch.autocast("cuda", torch.bfloat16) if narrow else nullcontext():
            loss = call(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().cpu() for name, value in model.named_parameters()}


def found_of(name: str, narrow: bool, cache: Path) -> dict[str, Any]:
    make = WORKLOADS[name].make
    expected = trained(plain := make(torch.float32, SEED).cuda(), plain, name, narrow)
    regions, compile_region = 0, inductor.RegionCompiler._compile

    def compile_only(self: inductor.RegionCompiler, region: Region) -> Any:
        nonlocal regions
        compile_region(self, region)
        regions += 1
        return lambda values: region.module(*values)

    model = make(torch.float32, SEED).cuda()
    before = set(cache.rglob("*.cubin"))
    with patch.object(inductor.RegionCompiler, "_compile", compile_only), patch.object(gpu, "available", lambda: False):
        found = trained(model, embrace_fx.compile(model, backend="inductor"), name, narrow)
    apart = max(float((found[each] - value).abs().max()) for each, value in expected.items())
    return {"regions": regions, "cubins": len(set(cache.rglob("*.cubin")) - before), "apart": apart}


def main() -> None:
    warnings.filterwarnings("error", "Inductor cannot compile")  # warned for a region that Inductor rejects
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    cases = [(name, narrow) for name in WORKLOADS for narrow in (False, True)]
    found = {f"{name}{', bfloat16' * narrow}": found_of(name, narrow, cache) for name, narrow in cases}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
