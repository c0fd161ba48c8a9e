"""A user's file: checked by mypy against an installed embrace_fx, then run with it on one process."""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import embrace_fx

warnings.simplefilter("error", DeprecationWarning)
warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)  # torch warns when Inductor is imported
logging.getLogger("embrace_fx").setLevel(logging.WARNING)


class Ratings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(1_000, 8)
        self.top = nn.Linear(8, 1)

    def forward(self, users: Tensor) -> Tensor:
        scores: Tensor = self.top(self.users(users))
        return scores.square().mean()


def train(model: nn.Module, batches: list[Tensor]) -> list[float]:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    compiled = embrace_fx.compile(model, optimizer=optimizer, schedule="2d", row_updates="exact")
    assert_type(compiled, embrace_fx.CompiledModel)
    found: list[float] = []
    for batch in compiled.lookahead(batches):
        loss = compiled(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    assert_type(compiled.report(), str)
    assert_type(compiled.plan, embrace_fx.Plan)
    with tempfile.TemporaryDirectory() as folder:
        compiled.plan.save(Path(folder) / "plan.json")
        assert embrace_fx.Plan.load(Path(folder) / "plan.json") == compiled.plan
    compiled.load_state_dict(compiled.state_dict())
    return found


def ask(model: nn.Module) -> int:
    planned = embrace_fx.plan(model, torch.arange(8), world_size=4, cluster=embrace_fx.Cluster(1e5, 0.1))
    assert_type(planned.schedule.diagnostics().step_ms, float)
    return planned.sent_bytes_per_step


if __name__ == "__main__":
    losses = train(Ratings(), [torch.arange(8)] * 4)
    assert losses[-1] < losses[0], losses
    assert ask(Ratings()) > 0
    print(f"embrace_fx {embrace_fx.__version__} under torch {torch.__version__}: trained")
