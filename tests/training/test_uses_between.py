"""Parameters read and written between a step and the next call: as under DDP, whoever does it and by what."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from tests.support import mode_uses
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.sides import DTYPE, CompiledSide, Side, draw_batches
from tests.support.training import whole_parameters
from tests.support.uses_between import USES, values

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")  # deprecated, and still used

Ended = tuple[dict[str, Tensor], list[Any]]


def _train(name: str, rank: int, side: Side) -> Ended:
    told = []
    for step, batch in enumerate(side.lookahead(draw_batches(rank, 6))):
        side.model(*batch).backward()
        side.step()
        if step > 0:
            told.append(USES[name](side, step))
        side.optimizer.zero_grad()
    return whole_parameters(side.model), told


def _adamw(model: Any, **options: Any) -> Any:
    return AdamW(model.parameters(), 0.02, eps=1e-3, weight_decay=0.05, **options)


def _both(rank: int, world_size: int, names: list[str]) -> dict[str, tuple[Ended, Ended]]:
    return {name: (_train(name, rank, CompiledSide(_adamw)), _train(name, rank, Side(_adamw))) for name in names}


def _foreach(model: Any) -> Any:
    return _adamw(model, foreach=True)


def _fused(model: Any) -> Any:
    return _adamw(model, fused=True)


def _momentum(model: Any) -> Any:
    return SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)


def _every_kind(rank: int, world_size: int) -> list[tuple[Ended, Ended]]:
    makers, name = (_foreach, _fused, _momentum), "every third read"
    return [(_train(name, rank, CompiledSide(make)), _train(name, rank, Side(make))) for make in makers]


@pytest.mark.long
def test_whatever_kernels_the_optimizer_steps_with() -> None:
    for found in run_ranks(2, _every_kind):
        for (ended, told), (expected, expected_told) in found:
            assert_same(ended, expected, DTYPE)
            torch.testing.assert_close(told, expected_told, rtol=1e-9, atol=1e-12)


def _watched(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Trains while a thread reads all parameters, again and again."""
    side, ends = CompiledSide(_adamw), threading.Event()

    def look() -> None:
        while not ends.is_set():
            values(side)

    thread = threading.Thread(target=look)
    for step, batch in enumerate(side.lookahead(draw_batches(rank, 30))):
        side.update(batch)
        if step == 0:  # capture puts other tensors in the place of parameters
            thread.start()
    ends.set()
    thread.join()
    plain = Side(_adamw)
    for batch in draw_batches(rank, 30):
        plain.update(batch)
    return whole_parameters(side.model), whole_parameters(plain.model)


@pytest.mark.long
def test_a_thread_that_looks_at_any_time_changes_nothing() -> None:
    for found, expected in run_ranks(2, _watched):
        assert_same(found, expected, DTYPE)


def _left(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    """What the plain model holds when the compiled one is gone."""
    found = []
    for side in (CompiledSide(_adamw), Side(_adamw)):
        for batch in draw_batches(rank, 3):
            side.update(batch)
        side.model = None
        gc.collect()
        found.append(values(side))
    return found[0], found[1]


def test_the_last_step_is_taken_where_the_compiled_model_goes() -> None:
    for found, expected in run_ranks(2, _left):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def _check(ranks: int, names: list[str]) -> None:
    for found in run_ranks(ranks, _both, names):
        for name, ((ended, told), (expected, expected_told)) in found.items():
            assert_same(ended, expected, DTYPE)
            for one, other in zip(told, expected_told, strict=True):
                torch.testing.assert_close({name: one}, {name: other}, rtol=1e-9, atol=1e-12)


def test_uses_on_two_ranks() -> None:
    _check(2, ["data clamped", "numpy from before written", "momentum reset", "target network", "read by a thread"])


def test_uses_in_modes_on_two_ranks() -> None:
    _check(
        2, ["read under a trace", "read under fake tensors", "read under grad", "given to grad", "read under make_fx"]
    )


def test_uses_that_ask_no_class_on_two_ranks() -> None:
    _check(2, ["read by a scripted function", "read by a scripted module from before", *mode_uses.TAKERS])


def test_uses_by_forked_children_on_two_ranks() -> None:
    _check(2, ["read by a forked child", "state read by a forked child", "read by a child that a thread forks"])


@pytest.mark.long
def test_all_uses_on_two_ranks() -> None:
    _check(2, list(USES))


@pytest.mark.long
def test_all_uses_on_three_ranks() -> None:
    _check(3, list(USES))
