"""Program: the cases of the kernels in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.support.kernel_interpreter 12

Argument: examples of each property. Prints JSON: case -> the traceback of what went wrong, or "". In a process of its
own, because Triton decides at its import whether to interpret.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from embrace_fx.runtime.kernels import gpu


class _SaysCuda(Tensor):
    """A tensor on the CPU whose `is_cuda` is True."""

    is_cuda: Any = property(lambda self: True)


WITHOUT_KERNELS = "files imported at their first call"


def _put(tensor: Tensor) -> Tensor:
    return tensor.clone().as_subclass(_SaysCuda)


def main(examples: int) -> dict[str, str]:
    torch.set_num_threads(1)
    settings.register_profile(
        "kernels",
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("kernels")
    from tests.support.kernel_cases import CASES, kernels_called  # noqa: PLC0415  (a property takes the profile of its definition)

    # Kernels must be imported when first called. All their callers are imported by now. Torch may have imported Triton.
    early = [name for name in sys.modules if name.startswith(f"{gpu.__name__}.")]
    results = {WITHOUT_KERNELS: f"found {early} imported before a kernel was called" if early else ""}
    for case in CASES:
        try:
            called, own = kernels_called(case, _put), set(CASES[case].split())
            results[case.__name__] = "" if called == own else f"expected calls of {own}, found {called}"
        except Exception:  # the test of the case reports it
            results[case.__name__] = traceback.format_exc()
    return results


if __name__ == "__main__":
    json.dump(main(int(sys.argv[1])), sys.stdout)
