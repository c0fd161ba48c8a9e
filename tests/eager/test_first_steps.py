"""Models that take seconds to capture: first steps as they are written, then as what was measured says; beside DDP."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from embrace_fx.planning import replanning
from embrace_fx.session import first_steps
from tests.support.ranks import run_ranks

STEPS = 20
LONG = 40
"""Steps until those of a captured forward have been measured too."""
LINEARS = 20


class Chain(nn.Module):
    """As many parameters as are run as they are written at first, behind a small table."""

    def __init__(self, rows: int = 500, width: int = 8, linears: int = LINEARS) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, width)
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(linears))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        for linear in self.linears:
            hidden = hidden + linear(hidden).tanh()
        loss: Tensor = hidden.square().mean()
        return loss


def _train(model: Any, rank: int, steps: int = STEPS) -> list[float]:
    generator, losses = torch.Generator().manual_seed(rank), []
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randint(20, (4, 6), generator=generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _beside_ddp(
    rank: int, world_size: int, cluster: embrace_fx.Cluster, made: dict[str, int], options: dict[str, Any]
) -> tuple[str, tuple[str, ...]]:
    """Returns why calls run as they are written, "" where they are captured, and the tables in shards."""
    torch.manual_seed(0)
    plain = Chain(**made)
    other = DistributedDataParallel(copy.deepcopy(plain))
    model = embrace_fx.compile(plain, cluster=cluster, **options)
    torch.testing.assert_close(_train(model, rank), _train(other, rank), rtol=1e-5, atol=1e-7)
    whole = model.full_state_dict()
    for name, parameter in other.module.named_parameters():
        torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-4, atol=1e-6)
    found = model.graphs.reason, model.plan.sharded
    assert ("route: eager" in model.report()) is bool(found[0])
    model.close()
    return found


@pytest.mark.long
def test_stays_as_it_is_written_where_nothing_would_be_gained() -> None:
    for reason, sharded in run_ranks(2, _beside_ddp, embrace_fx.Cluster(1e6, 0.05), {}, {}):
        assert "its tables are small" in reason
        assert sharded == ()


def test_is_captured_where_its_table_is_worth_sharding() -> None:
    for found in run_ranks(2, _beside_ddp, embrace_fx.Cluster(1e3, 20.0), {"rows": 20_000}, {}):
        assert found == ("", ("words.weight",))


def test_is_captured_where_buckets_take_longer_than_the_backward() -> None:
    for found in run_ranks(2, _beside_ddp, embrace_fx.Cluster(1e6, 1e3), {}, {}):
        assert found == ("", ())


def test_is_captured_at_once_where_that_is_asked_for_or_quick() -> None:
    for options, linears in (({"route": "graph"}, LINEARS), ({"schedule": "vertical"}, LINEARS), ({}, LINEARS // 2)):
        for reason, _ in run_ranks(2, _beside_ddp, embrace_fx.Cluster(1e6, 0.05), {"linears": linears}, options):
            assert reason == ""


def _measured_again(rank: int, world_size: int, loses: float) -> tuple[str, bool, list[str]]:
    """A capture whose steps are compared with those before it."""
    torch.manual_seed(0)
    plain = Chain(rows=20_000)
    other = DistributedDataParallel(copy.deepcopy(plain))
    model = embrace_fx.compile(plain, cluster=embrace_fx.Cluster(1e3, 20.0))
    with patch.object(first_steps, "WORTH", -1e9), patch.object(replanning, "LOSES", loses):  # anything gains
        torch.testing.assert_close(_train(model, rank, LONG), _train(other, rank, LONG), rtol=1e-5, atol=1e-7)
    whole = model.full_state_dict()
    for name, parameter in other.module.named_parameters():
        torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-4, atol=1e-6)
    found = model.graphs.reason, bool(model.plan.sharded), list(model.plan.history)
    model.close()
    return found


def test_a_capture_whose_steps_take_longer_is_given_up() -> None:
    for reason, sharded, history in run_ranks(2, _measured_again, 1e9):
        assert "a step took" in reason
        assert not sharded
        assert any("-> alltoall" in told for told in history)


def test_a_capture_whose_steps_take_less_stays() -> None:
    for reason, _, _ in run_ranks(2, _measured_again, 0.0):
        assert reason == ""


def _refusing(rank: int, world_size: int, limit: int) -> tuple[list[float], str]:
    """A capture that fails, after steps that have not."""
    torch.manual_seed(0)
    model = embrace_fx.compile(Turning(limit), cluster=embrace_fx.Cluster(1e6, 0.05))
    with patch.object(first_steps, "WORTH", -1e9):  # anything gains
        losses = _train(model, rank)
    found = losses, model.graphs.reason
    model.close()
    return found


class Turning(Chain):
    """Its forward reads a value."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (2.0 if int(ids.max()) > self.limit else 1.0)


def test_a_capture_that_fails_leaves_the_model_as_it_is_written() -> None:
    for losses, reason in run_ranks(2, _refusing, 10):
        assert len(losses) == STEPS
        assert "test_first_steps.py" in reason
