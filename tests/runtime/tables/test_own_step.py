"""An optimizer's own step over other tensors, what others see of the optimizer meanwhile; and tables step by step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

from embrace_fx.runtime.tables.own_step import step_tensor
from tests.support.golden import check_transcript, run_lines


class Watched(SGD):
    """Notes what whoever holds the user's optimizer finds in it during a step, and counts steps in an attribute."""

    users: Any = None
    found: tuple[Any, ...] = ()
    taken = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        user = type(self).users
        type(self).found = user.param_groups, user.state, user._optimizer_step_pre_hooks
        self.taken += 1
        super().step(closure)


def test_the_optimizer_is_as_it_was_while_its_step_is_taken_over_other_tensors() -> None:
    """Another thread may clear gradients meanwhile: of its own parameters, not of those that are stepped."""
    optimizer = Watched([nn.Parameter(torch.ones(3))], lr=0.5, momentum=0.9)
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    Watched.users, before = optimizer, (optimizer.param_groups, optimizer.state, optimizer._optimizer_step_pre_hooks)
    values = torch.ones(2)

    state = step_tensor(optimizer, {**optimizer.param_groups[0]}, values, torch.ones(2), {})

    assert all(found is its_own for found, its_own in zip(Watched.found, before, strict=True))
    assert values.tolist() == [0.5, 0.5]
    assert state["momentum_buffer"].tolist() == [1.0, 1.0]
    assert not optimizer.state
    assert optimizer.taken == 1
    hook.remove()


def test_tables_do_what_their_transcript_shows() -> None:
    modules = ("own_step", "row_store", "gradient_storage", "history", "model_state", "pending_parameters")
    check_transcript("tables", partial(run_lines, "runtime.tables", (*modules, "placement", "shard_layout", "table")))
