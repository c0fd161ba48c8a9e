"""Gradients that someone needs at once, while the order has them behind rows that are still to be submitted."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad

import embrace_fx
from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.launch import launch_queue
from tests.support.ranks import run_ranks

LONG_S = 10.0
"""Longer than anything takes."""


class Deep(nn.Module):
    """A table, and so many layers that on a slow link their gradients stand behind the next batch's rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2000, 32)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))

    def forward(self, ids_B: Tensor) -> Tensor:
        loss: Tensor = self.layers(self.table(ids_B)).square().mean()
        return loss


def _seconds_of_steps(rank: int, world_size: int, how: str) -> tuple[list[float], list[str]]:
    """Of a loop whose every step needs the gradients before the next forward; and the order of the launches."""
    torch.manual_seed(0)
    model = Deep()
    optimizer = Adagrad(model.parameters(), 0.01)
    if how == "a hook of the step":
        optimizer.register_step_post_hook(lambda *_: None)
    slow = Cluster(20.0, 0.1)
    compiled = embrace_fx.compile(model, optimizer=optimizer, strategy="alltoall", cluster=slow)
    random_ids = torch.Generator().manual_seed(rank)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_queue, "STANDSTILL_S", LONG_S)
        for batch in compiled.lookahead([torch.randint(2000, (200,), generator=random_ids) for _ in range(4)]):
            start_s = time.perf_counter()
            compiled(batch).backward()
            if how == "a gradient is read":
                gradient = model.get_parameter("layers.7.weight").grad
                assert gradient is not None
                assert gradient.isfinite().all()
            optimizer.step()
            optimizer.zero_grad()
            found.append(time.perf_counter() - start_s)
        compiled.synchronize()
    return found, list(compiled.schedule.launch_order)


@pytest.mark.long
@pytest.mark.parametrize("how", ["a hook of the step", "a gradient is read"])
def test_whoever_needs_gradients_at_once_does_not_wait_for_what_is_still_to_be_submitted(how: str) -> None:
    for seconds, order in run_ranks(2, _seconds_of_steps, how):
        assert order.index("table.weight rows") < order.index("bucket 0 [0]")
        assert max(seconds[1:]) < LONG_S / 2
