"""Backwards that add up on one process."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import nn

import embrace_fx


def test_a_single_process_sums_up_what_it_accumulates() -> None:
    """There is no bucket that takes the sum along."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(12, 1)).double()
    same = copy.deepcopy(plain)
    compiled = embrace_fx.compile(plain)
    batches = torch.randint(20, (3, 5, 3))

    for number, ids in enumerate(batches):
        with compiled.no_sync() if number < 2 else nullcontext():
            compiled(ids).square().mean().backward()
        same(ids).square().mean().backward()

    for found, expected in zip(plain.parameters(), same.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad, expected.grad)
