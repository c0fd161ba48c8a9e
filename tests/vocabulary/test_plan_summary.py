"""The first line fits a terminal, whatever tables are called; the report says how to shard and how to repeat."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from embrace_fx.vocabulary.plan import Candidate, Decision, Plan
from embrace_fx.vocabulary.plan_summary import LONGEST, summarize
from embrace_fx.vocabulary.plan_text import render, terminal_width
from tests.support.golden import check_golden


def table(name: str, strategy: str, candidates: tuple[Candidate, ...] = ()) -> Decision:
    return Decision(
        name, (10**6, 64), True, strategy, "40 of 1000000 rows read", 2**21, 2**29, 1.0, "", None, candidates
    )


def test_the_line_is_short_and_names_tables_as_far_as_there_is_room() -> None:
    long = [table(f"model.encoder.embeddings.word_embeddings_{k}.weight", "alltoall") for k in range(5)]
    few = [table("user.weight", "alltoall"), table("item.weight", "allreduce"), table("kept.weight", "frozen")]
    short = [replace(table(name, "alltoall"), sent_bytes_per_step=0, ddp_bytes_per_step=0) for name in "abcd"]
    lists = (long, [*long, few[1]], short, [few[0], *(replace(d, strategy="zen") for d in long)], few, few[:0])
    lines = [summarize(Plan(ranks, tuple(found), ())) for found in lists for ranks in (64, 1)]
    assert max(map(len, lines)) <= LONGEST
    check_golden("plan_lines", "\n".join(lines))


def test_dense_parameters_share_a_row_of_the_report_and_have_their_own_in_the_plan() -> None:
    dense = [
        Decision(f"layers.{k}.weight", (8, 8), False, "allreduce", "dense gradient", 256, 256, 0.1) for k in range(40)
    ]
    frozen = Decision("frozen.weight", (8,), False, "frozen", "takes no gradient", 0, 0, 0.0)
    plan = Plan(2, (replace(table("user.weight", "alltoall"), travels_as="int8"), *dense, frozen), ())

    assert all(f"layers.{k}.w" in str(plan) for k in (0, 39))  # a narrow terminal may wrap the rest of a name
    check_golden("plan_folded", render(plan, folded=True))
    assert "<pre" in plan._repr_html_()


def test_the_report_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(2, (table("user.weight", "alltoall"),), ())
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1)
    for columns, used in ((60, 80), (100, 100), (300, 200)):
        monkeypatch.setattr("os.get_terminal_size", lambda _, columns=columns: os.terminal_size((columns, 24)))
        assert terminal_width() == used
        assert max(map(len, str(plan).splitlines())) <= used
    monkeypatch.setattr("sys.stdout", None)  # as in a daemon
    assert terminal_width() == 160
