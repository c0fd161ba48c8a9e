"""A rank that calls the model alone, while others wait for it elsewhere: refused in seconds, and training goes on."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import embrace_fx
from embrace_fx.runtime.ranks.announcement import Announcements
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


def _asks_alone(rank: int, world_size: int, asked: str) -> tuple[str, float]:
    torch.manual_seed(0)
    model = embrace_fx.compile(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 1)), strategy="alltoall")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.arange(4) + rank

    def ask() -> None:
        if asked == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        elif asked == "norm":
            gradient = model.module.get_parameter("0.weight").grad
            assert gradient is not None
            gradient.norm()
        else:
            model.full_state_dict()

    told = ""
    for alone in (False, True, False):
        model(ids).square().mean().backward()
        if alone:
            began_s = time.monotonic()
            with pytest.raises(PeerFailure) as refused:
                model(ids) if rank == 1 else ask()
            told = str(refused.value)
            assert time.monotonic() - began_s < 2.0
        ask()
        optimizer.step()
        optimizer.zero_grad()
    return told, float(model.full_state_dict()["0.weight"].sum())


@pytest.mark.parametrize(("asked", "what"), [("clip", "norm"), ("norm", "norm"), ("whole", "all")])
def test_what_all_ranks_must_ask_for_is_refused_where_one_asks_alone(asked: str, what: str) -> None:
    """As `if rank == 0: log(clip_grad_norm_(...))` does. All are told at once, and may go on."""
    (told, first), (also_told, second) = run_ranks(2, _asks_alone, asked)

    assert told == also_told
    assert told.startswith("rank 0: expected every rank to ask what one asks of a sharded table, found this one asking")
    assert f"{what} of the sharded 0.weight alone, at test_lone_calls.py" in told
    assert first == second


@pytest.mark.long
def test_an_evaluation_on_one_rank_is_refused_while_the_others_wait_in_a_barrier() -> None:
    told, _ = run_ranks(2, _evaluates_alone)
    assert told.startswith(
        "rank 1: expected every rank to call the model, found this one in torch.distributed.barrier()"
    )
    assert "test_lone_calls.py" in told


def test_many_announcements_are_watched_by_one_look() -> None:
    looks: list[object] = []
    ranks: Any = SimpleNamespace(rank=0, group=object(), look_each_time=looks.append, let_ask=lambda ask: None)
    announcements = Announcements(ranks)

    for _ in range(3):  # of fast steps, before the thread has looked once
        announcements._look_out()

    assert len(looks) == 1
