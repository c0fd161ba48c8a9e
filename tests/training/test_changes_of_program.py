"""Loops that need another program while gradients and updates of the last step are on their way, beside DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.parts import differs, whole_of
from tests.support.programs import UNCAPTURED, Side, run_changes, sides_of
from tests.support.ranks import run_ranks


def _by_rank(one: str, other: str) -> str:
    return one if dist.get_rank() else other


def _inference_after_the_first_step(side: Side) -> Any:
    """Optimizer state that is created in inference mode could not be updated outside that mode."""
    return [side.train("a"), side.evaluate("a"), side.train("a"), side.evaluate("b"), side.train("b")]


def _inference_before_the_first_step(side: Side) -> Any:
    return [side.evaluate("a"), side.train("a"), side.train("a")]


def _inference_that_needs_another_plan(side: Side) -> Any:
    first = side.train("a")
    side.change("hook of a gradient", "a")
    return [first, side.evaluate("a"), side.train("a"), side.train("a")]


def _another_plan_on_one_rank_as_one_begins(side: Side) -> Any:
    first = [side.train("a"), side.train("a")]
    side.change("whole", "a")
    return [first, side.train(_by_rank("b", "a")), side.train("b")]


def _another_route_on_one_rank_as_a_plan_begins(side: Side) -> Any:
    first = [side.train("a"), side.train("a")]
    side.change("whole", "a")
    return [first, side.train(_by_rank(UNCAPTURED, "a")), side.train("b")]


def _gradients_of_zeros_over_plans(side: Side) -> Any:
    """Uses a table that is not read again, but decays."""
    first = side.train("a")
    side.zero("in place")
    side.change("whole", "a")
    return [first, side.train("b", zeroed="never"), side.kept]


def _no_graph_with_a_table_unread_so_far(side: Side) -> Any:
    return [side.train("a"), side.train(UNCAPTURED), side.train("a")]


def _no_graph_with_a_table_frozen_so_far(side: Side) -> Any:
    side.plain.tables[UNCAPTURED].requires_grad_(False)
    first = side.train("a")
    side.plain.tables[UNCAPTURED].requires_grad_(True)
    return [first, side.train(UNCAPTURED), side.train("a")]


def _gradients_kept_over_plans(side: Side) -> Any:
    """Keeps gradients of tables whose rows nothing has waited for."""
    losses = []
    for step, task in enumerate("aabbc"):
        losses.append(side.train(task))
        side.kept[str(step)] = side.plain.emb.weight.grad
        side.kept[f"{step} of its own"] = side.plain.tables[task].weight.grad
    return [losses, side.kept]


def _graphs_that_are_new_while_updates_are_pending(side: Side) -> Any:
    """Calls the model with other tasks and with other lengths."""
    return [side.train(task, length) for task, length in zip("aabbcca", (3, 3, 3, 4, 4, 2, 5), strict=True)]


LOOPS: dict[Callable[[Side], Any], str] = {
    _inference_after_the_first_step: "alltoall",
    _inference_before_the_first_step: "auto",
    _inference_that_needs_another_plan: "alltoall",
    _another_plan_on_one_rank_as_one_begins: "alltoall",
    _another_route_on_one_rank_as_a_plan_begins: "auto",
    _no_graph_with_a_table_unread_so_far: "auto",
    _no_graph_with_a_table_frozen_so_far: "auto",
    _gradients_kept_over_plans: "alltoall",
    _gradients_of_zeros_over_plans: "alltoall",
    _graphs_that_are_new_while_updates_are_pending: "alltoall",
}
"""Loops, and how tables are placed in each."""


def _trained(rank: int, world_size: int, loop: Callable[[Side], Any], strategy: str) -> str:
    sides = sides_of(strategy=strategy)
    found, expected = ([whole_of(loop(side)), side.ends()] for side in sides)
    sides[0].model.close()
    return differs(found, expected)


BY_DEFAULT = _another_route_on_one_rank_as_a_plan_begins, _gradients_kept_over_plans


@pytest.mark.parametrize(
    "loop",
    [pytest.param(loop, marks=() if loop in BY_DEFAULT else pytest.mark.long) for loop in LOOPS],
    ids=lambda loop: loop.__name__.strip("_"),
)
def test_a_loop_trains_as_under_ddp(loop: Callable[[Side], Any]) -> None:
    assert run_ranks(2, _trained, loop, LOOPS[loop]) == ["", ""]


@pytest.mark.long
def test_loops_that_need_other_programs_train_as_under_ddp() -> None:
    run_ranks(2, run_changes, 3, 8)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_loops_that_need_other_programs_train_as_under_ddp() -> None:
    run_ranks(2, run_changes, 200, 12, timeout_s=1500)
