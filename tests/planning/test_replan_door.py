"""Plans asked for by the user, or by a module that changed: once for a reason, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adagrad

import embrace_fx
from embrace_fx.session.programs import MODULE
from tests.support.drifting import DENSE, LINKS, TABLE, batch, make
from tests.support.messages import logged
from tests.support.ranks import run_ranks


def _asks(rank: int, world_size: int, ask: bool) -> tuple[list[str], list[str]]:
    """Trains while the batches' sparsity changes. Returns the table's strategies, and log lines about plans."""
    model = make(seed=rank)
    compiled = embrace_fx.compile(model, optimizer=Adagrad(model.parameters(), 0.05), cluster=LINKS, schedule="none")
    strategies = []
    with logged() as lines:
        for step in (0, *range(DENSE.start, DENSE.start + 4)):
            compiled(*batch(step, rank)).backward()
            compiled.optimizer.step()
            compiled.optimizer.zero_grad()
            strategies.append(compiled.plan[TABLE].strategy)
            if ask:
                compiled.replan()
    return strategies, [line for line in lines if "planned again" in line or "the plan is kept" in line]


def test_a_plan_that_is_asked_for_is_made_once_and_says_what_it_saves() -> None:
    (strategies, lines), (_, of_other) = run_ranks(2, _asks, True)
    assert strategies[0] == "alltoall"
    assert set(strategies[3:]) == {"allreduce"}
    (line,) = [line for line in lines if "planned again" in line]
    assert "(model.replan()): " in line
    assert f"{TABLE} alltoall -> allreduce (" in line
    assert "ms per step" in line
    assert any("the plan is kept" in line for line in lines)
    assert of_other == []


def test_before_the_first_call_there_is_nothing_to_plan_again() -> None:
    compiled = embrace_fx.compile(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="there is no plan yet"):
        compiled.replan()


def test_a_module_that_changed_asks_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    compiled = embrace_fx.compile(model, route="graph")
    compiled(torch.ones(1, 2)).sum().backward()
    model[1] = nn.Tanh()
    programs, asked = compiled._session.programs, []
    ask = programs.ask_to_replan

    def asks(reason: str) -> bool:
        asked.append(reason)
        return ask(reason)

    monkeypatch.setattr(programs, "ask_to_replan", asks)
    compiled(torch.ones(1, 2)).sum().backward()

    assert asked == [MODULE]


def test_a_plan_with_table_memory_stays(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(200, 4), nn.Flatten(), nn.Linear(8, 1))
    asked: Any = {"strategy": "alltoall", "table_memory": 0.5, "spill_to": tmp_path}
    compiled = embrace_fx.compile(model, optimizer=Adagrad(model.parameters(), 0.05), **asked)
    with logged() as lines:
        for _ in range(3):
            compiled(torch.arange(6).view(3, 2)).sum().backward()
            compiled.optimizer.step()
            compiled.optimizer.zero_grad()
            compiled.replan()
    assert any("the plan is kept" in line for line in lines)
    assert not any("planned again" in line for line in lines)
    compiled.close()
