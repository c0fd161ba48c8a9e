"""Strategies that are asked for, and other small parts of the planner, on examples."""

from __future__ import annotations

from functools import partial

from tests.support.golden import check_transcript, run_lines


def test_planner() -> None:
    modules = ("asked_strategies", "plan_fit", "step_cost")
    check_transcript("planner", partial(run_lines, "passes.planner", modules))
