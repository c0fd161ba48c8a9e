"""What the eager route takes of a processor for a parameter more: few calls of Python, in a step like others."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import embrace_fx
from embrace_fx.cost import links as cost
from tests.support.ranks import run_ranks

ROOT = Path(embrace_fx.__file__).parents[1]
WIDTH, FEW, MANY = 4, 4, 24
STEPS = range(13, 18)
"""Steps like others: their durations are not measured any more."""


def _calls(rank: int, layers: int) -> int:
    """Returns the smallest number of Python calls into this package in a step. Calls that wait for threads vary."""
    torch.manual_seed(0)
    model: Any = embrace_fx.compile(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))), route="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, own = 0, (f"{ROOT}/embrace_fx/", f"{ROOT}/passes/", f"{ROOT}/runtime/")

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(own)

    least = sys.maxsize
    for step in range(STEPS.stop):
        found = 0
        sys.setprofile(count if step in STEPS else None)
        model(torch.rand(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.setprofile(None)
        least = min(least, found) if step in STEPS else least
    model.close()
    return least


def _few_and_many(rank: int, world_size: int) -> tuple[int, int]:
    bucket_bytes = cost.choose_bucket_bytes
    cost.choose_bucket_bytes = lambda *arguments, **options: 1 << 20  # large enough for a single bucket
    try:
        return _calls(rank, FEW), _calls(rank, MANY)
    finally:
        cost.choose_bucket_bytes = bucket_bytes


def test_a_gradient_takes_few_calls() -> None:
    for few, many in run_ranks(2, _few_and_many):
        parameters = 2 * (MANY - FEW)
        assert many - few <= 5 * parameters, f"{(many - few) / parameters:.1f} calls for each parameter more"
