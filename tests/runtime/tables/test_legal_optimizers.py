"""Which optimizers may update rows, and what is said of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam

from embrace_fx.runtime.tables.row_optimizers import row_optimizer
from embrace_fx.vocabulary.exactness import KNOWN_OPTIONS, RowUpdates, row_update_blocker
from tests.support.definitions import EXACT, LAZY, D, Definition, V


def blocker(definition: Definition, row_updates: RowUpdates, **group: object) -> str | None:
    optimizer = definition(nn.Parameter(torch.ones(V, D)))
    return row_update_blocker(optimizer, {**optimizer.param_groups[0], **group}, row_updates)


@pytest.mark.parametrize("definition", EXACT, ids=str)
def test_optimizers_that_leave_rows_alone_are_legal(definition: Definition) -> None:
    assert blocker(definition, "exact") is None
    assert blocker(definition, "lazy") is None


@pytest.mark.parametrize("definition", LAZY, ids=str)
def test_optimizers_that_move_every_row_are_legal_only_when_lazy(definition: Definition) -> None:
    reason = blocker(definition, "exact")
    assert reason is not None
    assert "moves every row at each step" in reason
    assert "row_updates='lazy'" in reason
    assert blocker(definition, "lazy") is None


@pytest.mark.parametrize(
    ("definition", "moving"),
    [
        (Definition(SGD, {"momentum": 0.9}), "SGD with momentum=0.9 moves"),
        (Definition(SGD, {"weight_decay": 0.1}), "SGD with weight_decay=0.1 moves"),
        (Definition(SGD, {"momentum": 0.9, "weight_decay": 0.1}), "SGD with momentum=0.9 and weight_decay=0.1 moves"),
        (Definition(Adagrad, {"weight_decay": 0.1}), "Adagrad with weight_decay=0.1 moves"),
        (Definition(Adam), "Adam with betas=(0.9, 0.999) moves"),
        (Definition(AdamW), "AdamW with betas=(0.9, 0.999) and weight_decay=0.01 moves"),
    ],
    ids=str,
)
def test_reason_names_the_options_that_move_rows(definition: Definition, moving: str) -> None:
    assert str(blocker(definition, "exact")).startswith(moving)


@pytest.mark.parametrize("row_updates", ["exact", "lazy"])
@pytest.mark.parametrize(
    ("definition", "group", "reason"),
    [
        (Definition(SGD, {"differentiable": True}), {}, "SGD with differentiable=True"),
        (Definition(Adagrad, {"differentiable": True}), {}, "Adagrad with differentiable=True"),
        (Definition(Adam, {"differentiable": True}), {}, "Adam with differentiable=True"),
        (Definition(AdamW, {"capturable": True}), {}, "AdamW with capturable=True"),
        (Definition(SGD), {"lr": torch.tensor(0.1, requires_grad=True)}, "SGD has an lr that requires grad"),
        (Definition(SGD), {"weight_decay": torch.tensor(0.1)}, "SGD has a tensor as weight_decay"),
        (Definition(Adam, {"betas": (torch.tensor(0.9), torch.tensor(0.99))}), {}, "Adam has a tensor as betas"),
        (Definition(SparseAdam), {"betas": [torch.tensor(0.9), 0.99]}, "SparseAdam has a tensor as betas"),
        (Definition(SGD, {"momentum": 0.9, "dampening": 0.5}), {}, "SGD with dampening=0.5"),
        (Definition(Adagrad), {"initial_accumulator_value": 0.5}, "Adagrad ignores initial_accumulator_value=0.5"),
        (Definition(RMSprop), {}, "RMSprop is not known to update rows"),
    ],
    ids=str,
)
def test_what_no_row_update_can_honour_is_blocked(
    definition: Definition, group: dict[str, object], reason: str, row_updates: RowUpdates
) -> None:
    found = blocker(definition, row_updates, **group)
    assert found is not None
    assert found.startswith(reason)
    assert "\n" not in found


class Derived(SGD):
    """A user's own optimizer: it may do anything."""


def test_derived_class_is_unknown_unless_its_kind_is_vouched_for() -> None:
    optimizer = Derived([nn.Parameter(torch.ones(V, D))])
    group = optimizer.param_groups[0]
    assert row_update_blocker(optimizer, group, "exact") == "Derived is not known to update rows"
    assert row_update_blocker(optimizer, group, "exact", kind=SGD) is None
    with pytest.raises(TypeError, match=r"expected one of SGD, .* found Derived: keep the table data-parallel"):
        row_optimizer(Derived)


def test_option_of_a_later_torch_is_blocked() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(V, D))])
    optimizer.defaults["cautious"] = False
    reason = row_update_blocker(optimizer, optimizer.param_groups[0], "lazy")
    assert reason == "SGD has options that are not known to update rows: cautious"


@pytest.mark.parametrize("kind", list(KNOWN_OPTIONS), ids=lambda kind: kind.__name__)
def test_every_legal_kind_has_an_update_and_its_options_are_torchs(kind: type[Optimizer]) -> None:
    row_optimizer(kind)
    assert Definition(kind)(nn.Parameter(torch.ones(1, 1))).defaults.keys() == KNOWN_OPTIONS[kind]
