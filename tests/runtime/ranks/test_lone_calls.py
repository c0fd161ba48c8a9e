"""A rank that calls the model alone, while others wait for it elsewhere: refused in seconds, and training goes on."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

import embrace_fx
from embrace_fx.runtime.ranks.failure import PeerFailure
from tests.support.ranks import run_ranks


def _evaluates_alone(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = embrace_fx.compile(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1)), strategy="alltoall")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.arange(4) + rank

    def step() -> None:
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    told = ""
    if rank == 0:
        began_s = time.monotonic()
        try:
            with torch.no_grad():
                model(ids)
        except PeerFailure as refused:
            told = str(refused)
        assert time.monotonic() - began_s < 30.0
    dist.barrier()
    step()
    with torch.no_grad():
        model(ids)
    return told


def test_an_evaluation_on_one_rank_is_refused_while_the_others_wait_in_a_barrier() -> None:
    told, _ = run_ranks(2, _evaluates_alone)
    assert told.startswith(
        "rank 1: expected every rank to call the model, found this one in torch.distributed.barrier()"
    )
    assert "test_lone_calls.py" in told
