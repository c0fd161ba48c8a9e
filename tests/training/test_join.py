"""What `join` refuses; that it trains as under DDP is in `tests.support.scenarios.joins`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD

import embrace_fx
from tests.support.ranks import run_ranks, run_ranks_expecting_errors
from tests.support.scenarios.joins import Normed, ids_of, leave_a_sum
from tests.support.sides import DTYPE


def _step(model: Any, optimizer: SGD, ids: Tensor) -> None:
    model(ids).backward()
    optimizer.step()
    optimizer.zero_grad()


def _stops(rank: int, world_size: int) -> None:
    model = embrace_fx.compile(Normed().to(DTYPE))
    optimizer = SGD(model.parameters(), 0.1)
    with model.join(throw_on_early_termination=True):
        for k in range(2 + rank):
            _step(model, optimizer, ids_of(rank, k))


def _has_none(rank: int, world_size: int) -> None:
    model = embrace_fx.compile(Normed().to(DTYPE))
    try:
        with model.join():
            if rank:
                _step(model, SGD(model.parameters(), 0.1), ids_of(rank, 0))
    finally:
        dist.barrier()


def test_all_ranks_stop_where_that_is_asked() -> None:
    errors = run_ranks_expecting_errors(2, _stops)
    assert all("exhausted" in str(error) for error in errors)


def test_a_rank_without_any_batch_is_refused_on_all() -> None:
    errors = run_ranks_expecting_errors(2, _has_none)
    assert all("have no batch at all" in str(error) for error in errors)


def _one_outside_of_join(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = embrace_fx.compile(Normed().to(DTYPE))
    model(ids_of(rank, 0)).backward()
    if rank == 0:
        with model.join():
            model(ids_of(rank, 1))
    else:
        model(ids_of(rank, 1))


def test_a_rank_outside_of_join_is_named() -> None:
    for error in run_ranks_expecting_errors(2, _one_outside_of_join):
        assert "rank 1: this rank called the model outside of join()" in str(error)


def _trains_unevenly(rank: int, world_size: int, strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = embrace_fx.compile(Normed().to(DTYPE), strategy={"ids.weight": strategy})
    optimizer = SGD(model.parameters(), 0.001)
    for epoch in range(2):
        with model.join():
            for k in range(1 + (rank == epoch)):
                optimizer.zero_grad()  # a rank that has left still has the gradients of its last step
                model(ids_of(rank, 10 * epoch + k)).backward()
                optimizer.step()
        assert ("ids.weight" in model.plan.sharded) == (strategy == "alltoall")
    return model.full_state_dict()


def test_a_table_is_sharded_again_once_no_rank_has_a_batch() -> None:
    whole, sharded = (run_ranks(2, _trains_unevenly, strategy) for strategy in ("allreduce", "alltoall"))
    torch.testing.assert_close(sharded, whole, rtol=1e-9, atol=1e-12)


def _leaves_rows(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = embrace_fx.compile(Normed().to(DTYPE), strategy={"ids.weight": "alltoall"})
    leave_a_sum(rank, model, SGD(model.parameters(), 0.001), 0)


def test_rows_that_a_rank_has_summed_up_are_refused_on_all() -> None:
    for error in run_ranks_expecting_errors(2, _leaves_rows):
        assert "rank(s) 0 left the loop with gradients" in str(error)
