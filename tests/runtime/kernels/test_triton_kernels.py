"""The Triton kernels without a GPU: their cases in the interpreter.

The interpreter shows what a kernel computes, program after program. It shows neither races, nor how fast it is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from embrace_fx.runtime import kernels
from embrace_fx.runtime.kernels import gpu
from tests.support.kernel_cases import CASES
from tests.support.kernel_interpreter import WITHOUT_KERNELS

needs_triton = pytest.mark.skipif(
    not gpu.available(), reason="Triton is not installed: pip install 'embrace-fx[triton]'"
)


def _program(module: str, *arguments: str, **environment: str) -> Any:
    """What a program of this folder prints, from JSON."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[3],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def _interpreted(examples: int) -> dict[str, str]:
    return _program("tests.support.kernel_interpreter", str(examples), TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.parametrize("case", [WITHOUT_KERNELS, *(case.__name__ for case in CASES)])
def test_interpreted(case: str) -> None:
    failure = _interpreted(3)[case]
    assert not failure, failure


@needs_triton
@pytest.mark.long
@pytest.mark.timeout(600)
def test_interpreted_with_more_examples() -> None:
    failures = {case: failure for case, failure in _interpreted(400).items() if failure}
    assert not failures, "\n".join(failures.values())


def test_the_cases_call_every_kernel() -> None:
    called = {name for names in CASES.values() for name in names.split()}
    assert called == {name for names in gpu._FILES.values() for name in names}


def test_what_the_kernels_do_not_take() -> None:
    if gpu.available():
        assert gpu.supports(torch.ones(2, 3))
    for left_to_torch in (
        torch.ones(2, 3, dtype=torch.complex64),
        torch.ones(3, 2).t(),
        torch.ones(3, dtype=torch.int64),
    ):
        assert not gpu.supports(left_to_torch)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_kernel'"):
        _ = gpu.no_such_kernel
    assert kernels.LOCAL["embrace::lookup"] is kernels.lookup
