"""Forks of a process that trains: a child reads what is, and what needs other ranks is refused at once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from tests.support.mode_uses import in_a_child
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.sides import DTYPE, CompiledSide, Side, draw_batches
from tests.support.training import whole_parameters
from tests.support.uses_between import dense


def _adamw(model: Any) -> Any:
    return AdamW(model.parameters(), 0.02, eps=1e-3, weight_decay=0.05)


def _gradients(side: Side) -> Any:
    return in_a_child(lambda: [p.grad.sum().item() for p in dense(side) if p.grad is not None])


def _values(side: Side) -> Any:
    return in_a_child(lambda: [p.sum().item() for p in dense(side)])


def _trained(rank: int, side: Side, before: Callable[[Side], Any], after: Callable[[Side], Any]) -> Any:
    told = []
    for batch in draw_batches(rank, 5):
        side.model(*batch).backward()
        side.reduce()
        told.append(before(side))
        side.step()
        told.append(after(side))
        side.optimizer.zero_grad()
    return whole_parameters(side.model), told


def _all_fork(rank: int, world_size: int) -> Any:
    return [_trained(rank, side(_adamw), _gradients, _values) for side in (CompiledSide, Side)]


def _one_forks(rank: int, world_size: int) -> Any:
    read = (_gradients, _values) if rank == 1 else (lambda side: None, lambda side: None)
    return [_trained(rank, side(_adamw), *read) for side in (CompiledSide, Side)]


def _check(ranks: int, train: Callable[..., Any]) -> None:
    for (ended, told), (expected, expected_told) in run_ranks(ranks, train):
        assert_same(ended, expected, DTYPE)
        torch.testing.assert_close(told, expected_told, rtol=1e-9, atol=1e-12)


def test_children_of_all_ranks_find_gradients_and_parameters() -> None:
    _check(2, _all_fork)


def test_a_child_of_one_rank_finds_them_while_the_others_go_on() -> None:
    _check(3, _one_forks)


def _ask(rank: int, world_size: int) -> list[Any]:
    side = CompiledSide(_adamw)
    for batch in draw_batches(rank, 3):
        side.update(batch)
    table: Tensor = side.plain.words.weight
    asked = [
        in_a_child(lambda: table.sum().item()),
        in_a_child(lambda: side.model(*draw_batches(rank, 1)[0]).item()),
        in_a_child(lambda: side.plain.words(torch.ones(2, dtype=torch.int64)).sum().item()),
        in_a_child(lambda: pickle.dumps(table)),
    ]
    with side.model.whole() as whole:
        asked.append(in_a_child(lambda: whole.words.weight.sum().item()))
        expected = whole.words.weight.sum().item()
    side.update(draw_batches(rank, 1)[0])  # the ranks are as they were
    return [*asked, expected]


def test_what_needs_other_ranks_is_refused_in_a_child() -> None:
    for *refused, whole, expected in run_ranks(2, _ask):
        for told in refused:
            assert "a child that was forked" in told
            assert "model.whole()" in told
        assert whole == expected
