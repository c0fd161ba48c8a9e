"""How optimizers are noticed and surrounded, on one process: torch's step takes its own, and `.grad` is as it was."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from embrace_fx.runtime.ranks.announcement import Announcements
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.step.stepping import Stepping
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.row_table import RowTable


class Case:
    """A table of four rows, by rows on one process, and a bias beside it."""

    def __init__(self, make: type[Optimizer] = SGD, **options: Any) -> None:
        self.model = nn.Module()
        self.model.register_parameter("table", nn.Parameter(torch.ones(4, 2)))
        self.model.register_parameter("bias", nn.Parameter(torch.ones(2)))
        self.state, self.communicator = ModelState(self.model), Communicator(None)
        self.made_whole: list[tuple[str, str]] = []
        self.stepping = Stepping(self.state, Announcements(self.communicator), self._make_whole)
        self.optimizer = make(self.model.parameters(), **{"lr": 0.5, **options})
        parameter = self.table
        layout = Layout.of_table("table", parameter.shape, None, weakref.ref(self.communicator))
        table = RowTable(parameter, layout, "exact", None)
        self.state.tables["table"] = table

    def _make_whole(self, names: Sequence[str], reason: str) -> None:
        self.made_whole += [(name, reason) for name in names]

    @property
    def table(self) -> nn.Parameter:
        return self.model.get_parameter("table")

    def give_rows(self, ids: list[int]) -> Tensor:
        """A gradient of ones for some rows."""
        rows = torch.ones(len(ids), 2)
        self.state.tables["table"].add_gradient(torch.tensor(ids), rows)
        return rows


def test_an_optimizer_that_steps_the_model_is_adopted_once_and_no_other() -> None:
    case = Case()
    case.stepping.listen()
    other = SGD([nn.Parameter(torch.ones(1))], lr=1.0)

    for optimizer in (other, case.optimizer, case.optimizer):
        optimizer.step()

    assert case.stepping.holders.optimizers == [case.optimizer]
    assert len(case.optimizer._optimizer_step_pre_hooks) == 1
    assert not other._optimizer_step_pre_hooks


def test_rows_are_stepped_and_others_stand_still() -> None:
    case = Case()
    case.stepping.adopt(case.optimizer)
    case.give_rows([1, 3])

    case.optimizer.step()

    assert case.table.detach()[:, 0].tolist() == [1.0, 0.5, 1.0, 0.5]


def test_the_gradient_is_after_a_step_what_it_was_before() -> None:
    case = Case()
    case.stepping.adopt(case.optimizer)
    case.give_rows([1])
    before = case.table.grad
    assert before is not None

    case.optimizer.step()

    assert case.table.grad is before


def test_a_step_that_has_failed_is_forgotten_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no step")

    case = Case()
    case.stepping.adopt(case.optimizer)
    case.give_rows([1])
    before = case.table.grad

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[SGD.__module__], "sgd", fails)
        with pytest.raises(RuntimeError, match="no step"):
            case.optimizer.step()
    assert case.table[1, 0] == 1.0
    case.optimizer.step()

    assert case.table.grad is before
    assert case.table[1, 0] == 0.5


def test_an_optimizer_that_moves_all_rows_does() -> None:
    """Adam moves rows without gradient once they have had one."""
    case = Case(Adam)
    case.stepping.adopt(case.optimizer)
    for ids in ([1], [2]):
        case.give_rows(ids)
        case.optimizer.step()
        case.state.tables["table"].parameter.grad = None
    case.state.settle_tables()

    assert case.table[1, 0] < 0.5  # twice, of which once by its momentum
    assert case.table[0, 0] == 1.0


def test_steps_that_move_something_are_counted() -> None:
    case = Case()
    case.stepping.adopt(case.optimizer)

    case.optimizer.step()
    assert case.communicator.progress.optimizer_steps == 0
    case.give_rows([0])
    case.optimizer.step()
    assert case.communicator.progress.optimizer_steps == 1


def test_an_optimizer_that_is_not_element_wise_has_tables_made_whole() -> None:
    class Normed(SGD):
        """Of which nothing is known but that its step needs whole tensors."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter -= group["lr"] * parameter.grad / parameter.grad.norm()

    case = Case(Normed)
    case.stepping.adopt(case.optimizer)
    case.give_rows([0])

    case.optimizer.step()

    assert [name for name, _ in case.made_whole] == ["table"]


def test_hooks_of_the_users_see_gradients_before_they_are_taken_and_after_they_are_back() -> None:
    case = Case()
    case.stepping.listen()
    case.optimizer.step()  # adopts it
    seen: list[Tensor | None] = []
    case.optimizer.register_step_pre_hook(lambda *_: seen.append(case.table.grad))
    case.optimizer.register_step_post_hook(lambda *_: seen.append(case.table.grad))
    case.give_rows([2])
    given = case.table.grad

    case.optimizer.step()

    assert seen[0] is given
    assert seen[1] is given


def test_a_closure_is_evaluated_once_and_before_gradients_are_taken() -> None:
    case, losses = Case(), list[int]()
    case.stepping.adopt(case.optimizer)

    def closure() -> float:
        losses.append(len(losses))
        case.give_rows([0])
        return 2.0

    assert case.optimizer.step(closure) == 2.0
    assert losses == [0]
    assert case.table[0, 0] == 0.5


def test_a_replica_that_is_updated_by_rows_keeps_its_gradient_and_its_other_rows() -> None:
    case = Case(Adam)
    table = case.state.tables.pop("table")
    replica = RowTable(table.parameter, table.layout, "lazy")
    case.stepping.replicas = [replica]
    case.stepping.adopt(case.optimizer)
    rows = []
    for row in (1, 2):
        given = torch.zeros(4, 2)
        given[row] = 1.0
        case.table.grad = given
        case.optimizer.step()
        assert case.table.grad is given
        rows.append(case.table.detach()[:, 0].tolist())

    assert rows[0] == [1.0, pytest.approx(0.5), 1.0, 1.0]
    assert rows[1][:2] == rows[0][:2]  # Adam itself would have moved it on by its momentum
    assert rows[1][2] < 1.0 == rows[1][3]


def test_optimizers_do_not_keep_their_model_alive() -> None:
    case = Case()
    case.stepping.adopt(case.optimizer)
    parameters = [nn.Parameter(torch.ones(1))]
    optimizer, stepping = case.optimizer, case.stepping
    assert any(hook.stepping() is stepping for hook in optimizer._optimizer_step_pre_hooks.values())  # type: ignore[attr-defined]

    hooks = list(optimizer._optimizer_step_pre_hooks.values())
    del case, stepping
    gc.collect()

    assert all(hook.stepping() is None for hook in hooks)  # type: ignore[attr-defined]
    optimizer.add_param_group({"params": parameters})
    optimizer.step()  # as if nobody had adopted it
