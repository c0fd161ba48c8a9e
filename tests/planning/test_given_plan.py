"""A plan that is repeated: the same program without a probe, or a refusal on every rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad

import embrace_fx
from embrace_fx.planning import findings
from tests.support.beside import take_steps
from tests.support.ranks import run_ranks, run_ranks_expecting_errors
from tests.support.sides import DTYPE, Matching, draw_batch


def train(rank: int, steps: int = 3, **options: Any) -> tuple[embrace_fx.CompiledModel, dict[str, Tensor]]:
    torch.manual_seed(3)
    plain = Matching().to(DTYPE)
    optimizer = Adagrad(plain.parameters(), lr=0.1, eps=1e-3)
    model = embrace_fx.compile(plain, optimizer=optimizer, **options)
    take_steps(model, optimizer, [draw_batch(step, rank) for step in range(steps)])
    return model, model.full_state_dict()


def save_and_repeat(rank: int, world_size: int, folder: Path) -> tuple[bool, int]:
    first, expected = train(rank, strategy={"words.*": "alltoall", "items.*": "allreduce"})
    first.plan.save(folder / f"{rank}.json")
    probed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(findings, "measure_links", lambda *_: probed.append(1))  # records a call, which must not happen
        second, found = train(rank, plan=folder / f"{rank}.json")
        third, _ = train(rank, plan=first.plan)
    same = all(torch.equal(value, found[name]) for name, value in expected.items())
    return same and first.plan == second.plan == third.plan, len(probed)


@pytest.mark.long
def test_a_saved_plan_is_repeated(tmp_path: Path) -> None:
    assert run_ranks(2, save_and_repeat, tmp_path) == [(True, 0)] * 2


class Grown(Matching):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)


def repeat_elsewhere(rank: int, world_size: int, path: Path, case: str) -> None:
    plain = (Grown if case == "grown" else Matching)().to(DTYPE)
    optimizer = SGD(plain.parameters(), lr=0.1)
    given = path if case != "missing on a rank" or rank == 0 else path / "nowhere"
    strategy: Any = "allreduce" if case == "a strategy too" else "auto"
    model = embrace_fx.compile(plain, optimizer=optimizer, plan=given, strategy=strategy)
    model(*draw_batch(0, rank))


REFUSALS = {
    "missing on a rank": r"rank 1: .*nowhere.* is not a plan",
    "a strategy too": r"both a plan and strategy=.*Leave out one",
    "grown": r"these parameters are in only one of plan and model: more.bias, more.weight. Pass a plan",
}


def save(rank: int, world_size: int, path: Path) -> None:
    model, _ = train(rank, 1, strategy="alltoall")
    if rank == 0:
        model.plan.save(path)


def test_a_plan_that_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, save, tmp_path / "plan.json")
    for case, told in REFUSALS.items():
        for error in run_ranks_expecting_errors(2, repeat_elsewhere, tmp_path / "plan.json", case):
            assert isinstance(error, ValueError), case
            assert re.search(told, str(error)), f"{case}: {error}"
    for error in run_ranks_expecting_errors(3, repeat_elsewhere, tmp_path / "plan.json", "other ranks"):
        assert "the plan is for 2 ranks, but 3 are running" in str(error)
