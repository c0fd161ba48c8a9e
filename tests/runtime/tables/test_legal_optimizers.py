"""Which rule a table's step follows under which optimizer and options."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_pre_hook

from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table import Member
from embrace_fx.runtime.tables.update_rule import (
    DeferredUpdate,
    DenseUpdate,
    SparseUpdate,
    dense_update_policy,
)
from embrace_fx.vocabulary.exactness import ELEMENT_WISE, STILL, RowUpdates
from embrace_fx.vocabulary.row_wise import RowWiseAdagrad
from tests.support.definitions import EXACT, LAZY, D, Definition, V

MOVE = [Definition(kind) for kind in (ASGD, Adadelta, Adamax, NAdam, RAdam, RMSprop, Rprop)]


def way(definition: Definition, row_updates: RowUpdates, **group: object) -> str:
    optimizer = definition(nn.Parameter(torch.ones(V, D)))
    return dense_update_policy(type(optimizer), {**optimizer.param_groups[0], **group}, row_updates, torch.float32)


@pytest.mark.parametrize("definition", EXACT, ids=str)
def test_rows_that_stand_still_of_their_own_accord_do(definition: Definition) -> None:
    assert way(definition, "exact") in STILL
    assert way(definition, "lazy") in STILL


@pytest.mark.parametrize("definition", [*LAZY, *MOVE], ids=str)
def test_rows_that_move_stand_still_only_when_lazy(definition: Definition) -> None:
    assert way(definition, "exact") not in STILL
    assert way(definition, "lazy") == "lazy"


def test_a_rate_of_zero_does_not_hide_that_rows_move() -> None:
    assert way(Definition(SGD, {"weight_decay": 0.1}), "exact", lr=0.0) not in STILL


def test_every_class_of_torchs_has_been_asked() -> None:
    asked = {definition.kind for definition in (*EXACT, *LAZY, *MOVE)}
    assert asked == ELEMENT_WISE


class Derived(SGD):
    """A user's own optimizer, about which nothing is known."""

    element_wise = True


@pytest.mark.parametrize("row_updates", ["exact", "lazy"])
@pytest.mark.parametrize(
    ("definition", "group"),
    [
        (Definition(SGD, {"differentiable": True}), {}),
        (Definition(Adam, {"differentiable": True}), {}),
        (Definition(AdamW, {"capturable": True}), {}),
        (Definition(SGD), {"lr": torch.tensor(0.1, requires_grad=True)}),
        (Definition(Derived), {}),
        (Definition(SGD, {"momentum": 0.9, "dampening": 0.5}), {}),  # torch does not dampen a row's first gradient
    ],
    ids=str,
)
def test_what_no_step_of_some_rows_can_honour_is_swept(
    definition: Definition, group: dict[str, object], row_updates: RowUpdates
) -> None:
    assert way(definition, row_updates, **group) == "sweep"


@pytest.mark.parametrize(
    ("definition", "can_rest", "rules"),
    [
        (Definition(SGD), True, [SparseUpdate, SparseUpdate]),
        (Definition(Adam), True, [DeferredUpdate, DeferredUpdate]),
        (Definition(Adam), False, [DenseUpdate, DenseUpdate]),
        (Definition(Rprop), True, [DenseUpdate, DenseUpdate]),
        (Definition(RowWiseAdagrad), True, [SparseUpdate, SparseUpdate]),
    ],
    ids=str,
)
def test_a_table_tells_the_rule_of_its_next_step(definition: Definition, can_rest: bool, rules: list[type]) -> None:
    table = _table(definition(nn.Parameter(torch.ones(V, D))), can_rest=can_rest)
    found = []
    for _ in rules:
        found.append(table.rule)
        table.begin_step().finish([(torch.tensor([1, 2]), torch.ones(2, D))])
    assert found == rules


def _table(optimizer: Optimizer, *, can_rest: bool) -> Member:
    parameter: nn.Parameter = optimizer.param_groups[0]["params"][0]
    layout = Layout.of_table("t", parameter.shape)
    return Member(parameter, layout, "exact", optimizer, may_defer=lambda: can_rest)


def test_a_scheduler_changes_the_rule() -> None:
    table = _table(SGD([nn.Parameter(torch.ones(V, D))], lr=0.1), can_rest=False)
    group = table.optimizer_of_members.param_groups[0]
    assert table.rule is SparseUpdate
    group["momentum"] = torch.tensor(0.5)
    assert table.rule is DenseUpdate
    group["momentum"].zero_()
    assert table.rule is SparseUpdate


def test_a_trial_touches_nothing_and_nobody_sees_it() -> None:
    seen: list[object] = []
    parameter = nn.Parameter(torch.ones(V, D))
    optimizer = Adam([parameter], betas=(0.123, 0.456))  # unusual options, for which no trial is cached yet
    handle = register_optimizer_step_pre_hook(lambda *given: seen.append(given))
    try:
        assert dense_update_policy(Adam, optimizer.param_groups[0], "exact", torch.float32) not in STILL
    finally:
        handle.remove()
    assert not seen
    assert not optimizer.state
    assert torch.equal(parameter, torch.ones(V, D))


def test_a_number_that_is_a_tensor_is_read_as_one() -> None:
    assert way(Definition(Adagrad, {"lr": torch.tensor(0.1)}), "exact", weight_decay=torch.tensor(0.1)) == "sweep"
