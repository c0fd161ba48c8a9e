"""Plain data, sizes, row-wise Adagrad, the figures of a timeline and others, on examples that are counted by hand."""

from __future__ import annotations

from functools import partial

from tests.support.golden import check_transcript, run_lines


def test_vocabulary() -> None:
    modules = ("in_place", "joined_table", "modes", "operation_id", "plain_data", "plan", "plan_summary", "proxies")
    check_transcript("vocabulary", partial(run_lines, "vocabulary", (*modules, "row_wise", "schedule", "sizes")))
