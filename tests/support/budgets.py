"""Models whose steps are held within a budget, and what their steps hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.support.checkpointed import WORDS, Model, all_in_one, gradients
from tests.support.counted_memory import CountedMemory

IDS = torch.randint(WORDS, (16, 24), generator=torch.Generator().manual_seed(0))


def plain(model: Model, ids: Tensor) -> Tensor:
    return all_in_one(model, model.table(ids))


def make(blocks: Callable[[], nn.Module], through: Callable[..., Tensor] = plain) -> Model:
    torch.manual_seed(0)
    return Model(through, blocks)


def measured(model: nn.Module, call: Callable[..., Tensor]) -> tuple[int, int]:
    """Returns the bytes saved for the backward, and the peak bytes, of a model's second step."""
    gradients(model, call, IDS)
    with CountedMemory([*model.parameters(), *model.buffers(), IDS]) as counted:
        loss = call(IDS)
        saved = counted.held_bytes
        loss.backward()
    model.zero_grad()
    return saved, counted.peak_bytes
