"""Rows that take many steps without a gradient at once end where the optimizer's own steps lead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from embrace_fx.runtime.kernels import decay
from embrace_fx.runtime.tables.history import DeferredAdam, DeferredSGD, History, deferred_steps_class
from embrace_fx.runtime.tables.update_rule import DeferredUpdate
from tests.support.tiers import OPTIMIZERS

ROWS, COLUMNS, STEPS = 20, 5, 250
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}

SKIPPED: dict[str, Callable[..., Optimizer]] = {
    # Leave out Adagrad and plain SGD, which do not change rows without a gradient.
    **{name: make for name, make in OPTIMIZERS.items() if "adagrad" not in name and name != "sgd"},
    "adamw": partial(AdamW, lr=0.01, weight_decay=0.1),
    "amsgrad": partial(AdamW, lr=0.01, amsgrad=True),
    "betas": partial(Adam, lr=0.01, betas=(0.5, 0.9)),
    "nesterov": partial(SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1, maximize=True),
}


class _Table:
    """A table that its optimizer steps densely, and a copy whose rows skip steps."""

    def __init__(self, make: Callable[..., Optimizer], dtype: torch.dtype) -> None:
        self._random = torch.Generator().manual_seed(0)
        self.parameter = nn.Parameter(self._draw(ROWS, dtype))
        self.optimizer = make([self.parameter])
        self._step(torch.arange(ROWS))
        self.local = self.parameter.detach().clone()
        self.state = {key: v.clone() if isinstance(v, Tensor) else v for key, v in self._own_state.items()}
        self.history = History(self.unit)

    def _draw(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.randn((rows, COLUMNS), generator=self._random, dtype=torch.float64).to(dtype)

    @property
    def _own_state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state[self.parameter]
        return found

    @property
    def options(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]

    @property
    def unit(self) -> Any:
        return self

    @property
    def store(self) -> Any:
        return self

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        return ids

    @property
    def shape(self) -> torch.Size:
        return self.local.shape

    @property
    def optimizer_of_members(self) -> Optimizer:
        return self.optimizer

    def param_group(self) -> dict[str, Any]:
        return self.options

    def keep(self, state: Mapping[str, Any]) -> None:
        self.state.update(state)

    def _step(self, ids: Tensor) -> Tensor:
        rows = self._draw(ids.numel(), self.parameter.dtype)
        self.parameter.grad = torch.zeros_like(self.parameter).index_copy(0, ids, rows)
        self.optimizer.step()
        return rows

    @torch.no_grad()
    def step(self, *read: int) -> None:
        """Takes a step in which the rows `read` have a gradient."""
        ids = torch.tensor(read, dtype=torch.int64)
        with torch.enable_grad():
            rows = self._step(ids)
        DeferredUpdate(self.unit).finish([(ids, rows)])

    def check(self) -> None:
        self.history.close()
        tolerance = TOLERANCES[self.local.dtype]
        torch.testing.assert_close(self.local, self.parameter.detach(), rtol=tolerance, atol=tolerance)
        assert self.state.keys() == self._own_state.keys()
        for key, value in self._own_state.items():
            torch.testing.assert_close(self.state[key], value, rtol=tolerance, atol=tolerance, msg=key)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SKIPPED)
def test_rows_that_have_rested_end_where_the_optimizer_leads(name: str, dtype: torch.dtype) -> None:
    table = _Table(SKIPPED[name], dtype)
    for step in range(STEPS):
        table.options["lr"] = 0.01 * (1 + (step % 7) / 7)  # positive: only step 100 has a learning rate of zero
        if step == 100:
            table.options["lr"] = 0.0
        read = {0: (), 1: (3, 4), 2: (3,), 50: (1, 3), 51: (19,), 249: (0, 3)}.get(step, (2,))
        table.step(*read)
        if step == 150:
            table.check()
    table.check()


@pytest.mark.parametrize("name", ["adamw", "amsgrad"])
def test_rows_take_all_steps_at_once_where_their_root_fades_slowly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's first steps, whose bias corrections change fast, are taken one by one."""
    one_by_one: list[int] = []
    walk = decay._apply_in_order

    def watched(shard: Tensor, averages: decay.Averages, rows: decay._RemainingRows, *rest: Any) -> None:
        one_by_one.append(rows.ids.numel())
        walk(shard, averages, rows, *rest)

    monkeypatch.setattr(decay, "_apply_in_order", watched)
    table = _Table(SKIPPED[name], torch.float32)
    for _ in range(20):
        table.step()
    table.check()
    assert sum(one_by_one) > 0

    for _ in range(300):
        table.step(*range(ROWS))
    one_by_one.clear()
    for step in range(200):
        table.step(step % 3, 5)
    table.check()
    assert sum(one_by_one) == 0


def test_a_row_is_caught_up_once_however_often_it_is_named() -> None:
    table = _Table(SKIPPED["adamw"], torch.float64)
    for _ in range(3):
        table.step(1)
    table.history.apply_deferred(torch.tensor([7, 7, 2, 7]))
    before = table.local.clone()
    table.history.apply_deferred(torch.tensor([2, 7]))

    assert torch.equal(table.local, before)
    torch.testing.assert_close(before[[2, 7]], table.parameter.detach()[[2, 7]], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(before[5], table.parameter.detach()[5], rtol=1e-6)
    table.check()


@pytest.mark.parametrize(
    ("make", "form"),
    [
        (partial(AdamW, lr=0.1), DeferredAdam),
        (partial(Adam, lr=0.1, weight_decay=0.1), None),
        (partial(Adam, lr=0.1, weight_decay=0.1, decoupled_weight_decay=True), DeferredAdam),
        (partial(Adam, lr=0.1, betas=(0.999, 0.99)), None),
        (partial(SGD, lr=0.1, momentum=0.9), DeferredSGD),
        (partial(SGD, lr=0.1, momentum=0.9, dampening=0.5), None),
        (partial(RMSprop, lr=0.1, momentum=0.9), DeferredSGD),
        (partial(RMSprop, lr=0.1, weight_decay=0.1), None),
        (partial(Adagrad, lr=0.1, weight_decay=0.1), None),
        (partial(NAdam, lr=0.1), None),
    ],
)
def test_what_can_be_skipped(make: Callable[..., Optimizer], form: type | None) -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    optimizer = make([parameter])
    options = optimizer.param_groups[0]

    assert deferred_steps_class(type(optimizer), options, torch.float32) is form
    assert deferred_steps_class(type(optimizer), options, torch.bfloat16) is None
