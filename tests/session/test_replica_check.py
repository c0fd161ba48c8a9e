"""`check_replicas`: what one rank alone has otherwise is found, with its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

import embrace_fx
from embrace_fx.runtime.ranks.checksums import checksum, describe_divergence
from tests.support.cases import long_but
from tests.support.ranks import run_ranks
from tests.support.words import words_batch, words_model

STEPS = 6


def flip(tensor: Tensor) -> None:
    """Flips a bit of one element. A later rounding cannot undo the change, because the bit is not the lowest."""
    with torch.no_grad():
        tensor.view(torch.int64).view(-1)[2] ^= 1 << 20


def a_parameter(plain: Any, optimizer: Any) -> None:
    flip(plain.linear.weight)


def optimizer_state(plain: Any, optimizer: Any) -> None:
    flip(optimizer.state[plain.linear.weight]["exp_avg_sq"])


def a_counter_of_a_shard(plain: Any, optimizer: Any) -> None:
    optimizer.state[plain.table.weight]["step"] += 1


def a_learning_rate(plain: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 1 + 1e-15


CHANGES: dict[Callable[[Any, Any], None], str] = {
    a_parameter: "linear.weight on rank 1 differs from rank 0's",
    optimizer_state: "exp_avg_sq of linear.weight (Adam) on rank 1 differs from rank 0's",
    a_counter_of_a_shard: "step of table.weight (Adam) on rank 1 differs from rank 0's",
    a_learning_rate: "param group 0 of optimizer 0 (Adam) on rank 1 differs from rank 0's",
}


def train_with_a_change(rank: int, world_size: int, change: Callable[[Any, Any], None]) -> str:
    """Returns the message of the check after the change. The checks before it must not raise."""
    plain = words_model()
    optimizer = Adam(plain.parameters(), lr=0.01)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy={"table.weight": "alltoall"})
    for step, batch in enumerate(model.lookahead([words_batch(step, rank) for step in range(STEPS)])):
        model(*batch).backward()
        optimizer.step()
        model.check_replicas()
        if step == STEPS - 2 and rank == 1:
            change(plain, optimizer)
        if step == STEPS - 2:
            with pytest.raises(embrace_fx.DivergedReplicas) as found:
                model.check_replicas()
            return str(found.value)
        optimizer.zero_grad()
    return ""


@pytest.mark.parametrize(
    "change", long_but(("a_parameter", "a_counter_of_a_shard"), {each.__name__: (each,) for each in CHANGES})
)
def test_what_one_rank_has_otherwise_is_found(change: Callable[[Any, Any], None]) -> None:
    for said in run_ranks(2, train_with_a_change, change):
        assert CHANGES[change] in said
        assert said.startswith("Replicas differ: ")
        assert "Load a checkpoint on every rank" in said


def test_the_rank_that_is_alone_is_named() -> None:
    assert "b on rank 0 differs from rank 1's" in describe_divergence([{"b": 1}, {"b": 2}, {"b": 2}])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
def test_a_checksum_sees_one_bit(dtype: torch.dtype) -> None:
    values = torch.arange(36).to(dtype)[1:].view(5, 7)  # an unaligned view, whose size is no multiple of a word
    before = checksum(values.t())
    assert checksum(values.t().clone(memory_format=torch.contiguous_format)) == before
    for place in (0, 7, 34):
        bits = values.view(-1)[place : place + 1].view(torch.uint8)
        bits[0] ^= 1
        assert checksum(values.t()) != before
        bits[0] ^= 1


def train_without_a_step(rank: int, world_size: int) -> str:
    plain = words_model()
    optimizer = Adam(plain.parameters(), lr=0.01)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy="alltoall")
    saved = {}
    for step in range(6):
        if step == 2:
            saved = model.full_state_dict()
        try:
            model(*words_batch(step, rank)).backward()
        except embrace_fx.PeerFailure as error:
            model.load_state_dict(saved)
            model(*words_batch(step, rank)).backward()
            return str(error)
        if rank == 0 or step != 3:
            optimizer.step()
        optimizer.zero_grad()
    return ""


def test_a_rank_that_has_left_out_a_step_is_named() -> None:
    for said in run_ranks(2, train_without_a_step):
        assert "rank 0: ranks have taken different numbers of optimizer steps (4 on this rank)" in said
        assert "rank 1: ranks have taken different numbers of optimizer steps (3 on this rank)" in said
