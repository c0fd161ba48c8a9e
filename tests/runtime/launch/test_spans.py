"""What `torch.profiler` shows of a step, and that nothing is made where it does not run."""

from __future__ import annotations

import torch
from torch import nn
from torch.profiler import profile

import embrace_fx
from embrace_fx.runtime.launch import spans
from tests.support.ranks import run_ranks


def profiled(rank: int, ranks: int) -> set[str]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(4000, 16), nn.Flatten(), nn.Linear(64, 4))
    model = embrace_fx.compile(plain, cluster=embrace_fx.Cluster(), strategy={"0.weight": "alltoall"})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(torch.arange(24).view(6, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile() as found:
        step()
    assert spans.span("forward") is spans._NONE
    return {each.key for each in found.key_averages() if each.key.startswith("embrace_fx: ")}


def test_phases_and_exchanges_have_spans() -> None:
    for shown in run_ranks(2, profiled):
        assert {"embrace_fx: forward", "embrace_fx: backward"} <= shown
        assert "embrace_fx: submit bucket 0 [0]" in shown
        assert any(name.startswith("embrace_fx: submit 0.weight") for name in shown)
        assert any(name.startswith("embrace_fx: wait for ") for name in shown)
