"""A float, an int and a text that are others in each call: few captures, then the forward runs as it is written."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from embrace_fx.session.captures import MOST_UNUSED
from tests.eager.models import Classifier, labelled
from tests.support.ranks import run_ranks


class Annealed(Classifier):
    """Its loss is weighted by two numbers; a text rides along."""

    def forward(  # type: ignore[override]
        self, ids: Tensor, kinds: Tensor, weight: float, step: int, text: str
    ) -> Tensor:
        hidden = self.encode(ids)
        return F.cross_entropy(self.head(hidden), kinds) * weight + min(1.0, step / 100) * hidden.square().mean()


def _train(model: Any, rank: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Losses, milliseconds and MiB in use, by step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, took_ms, used = [], [], []
    for step in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(*labelled(step, rank), 1 / (1 + step), step, f"step {step}")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        took_ms.append((time.perf_counter() - began) * 1e3)
        if step % 100 == 0:
            gc.collect()
            used.append(int(Path("/proc/self/statm").read_text().split()[1]) / 256)
    return losses, took_ms, used


def _both(rank: int, world_size: int, steps: int) -> tuple[bool, int, str, list[float], list[float]]:
    torch.set_default_dtype(torch.float64)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Annealed())
    expected, *_ = _train(DistributedDataParallel(made[0]), rank, steps)
    compiled = embrace_fx.compile(made[1], strategy="alltoall")
    found, took_ms, used = _train(compiled, rank, steps)
    same = torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-9, atol=1e-12)
    return same, compiled._session._captures.count, compiled.report().rpartition("route: ")[2], took_ms, used


def test_numbers_that_never_repeat_have_the_forward_run_as_it_is_written() -> None:
    for same, captures, route, *_ in run_ranks(2, _both, 8):
        assert same
        assert captures == MOST_UNUSED[float]
        assert "keeps changing (0.33" in route


@pytest.mark.long
def test_two_thousand_steps_are_alike() -> None:
    for same, captures, _, took_ms, used in run_ranks(2, _both, 2000):
        assert same
        assert captures <= 3
        assert used[-1] < used[2] + 20
        assert median(took_ms[-500:]) < 2 * median(took_ms[100:600])


class Scaled(nn.Module):
    """Reads an attribute that the loop anneals."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.scale = nn.Embedding(8, 4), 1.0

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = (self.rows(ids) * self.scale).square().sum()
        return found


def test_the_report_names_the_attribute_that_keeps_changing() -> None:
    model = Scaled()
    compiled = embrace_fx.compile(model)
    for step in range(6):
        model.scale = 1.0 / (1 + step)
        assert compiled(torch.arange(4)).item() == pytest.approx(model(torch.arange(4)).item())
    assert "the forward reads self.scale, which keeps changing" in compiled.report()


def _scale(compiled: Any) -> None:
    for step in range(6):
        compiled.module.scale = 1.0 / (1 + step)
        compiled(torch.arange(4))


def test_the_graph_route_refuses_it() -> None:
    with pytest.raises(embrace_fx.CaptureError, match=r"reads self\.scale, which was"):
        _scale(embrace_fx.compile(Scaled(), route="graph"))
