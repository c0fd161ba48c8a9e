"""The first line fits a terminal, whatever tables are called; the report says how to shard and how to repeat."""

from __future__ import annotations

import os

import pytest

from embrace_fx.vocabulary.plan import Candidate, Decision, Plan
from embrace_fx.vocabulary.plan_summary import LONGEST, give_advice, summarize
from embrace_fx.vocabulary.plan_text import render


def table(name: str, strategy: str, candidates: tuple[Candidate, ...] = ()) -> Decision:
    return Decision(
        name, (10**6, 64), True, strategy, "40 of 1000000 rows read", 2**21, 2**29, 1.0, "", None, candidates
    )


def test_the_line_is_short_and_names_tables_as_far_as_there_is_room() -> None:
    long = [table(f"model.encoder.embeddings.word_embeddings_{k}.weight", "alltoall") for k in range(5)]
    few = [table("user.weight", "alltoall"), table("item.weight", "allreduce")]
    assert len(summarize(Plan(64, tuple(long), ()))) <= LONGEST
    assert summarize(Plan(64, tuple(long), ())).startswith(
        "5 tables sharded, 0 whole; a rank sends 10.0 MiB per step, DDP "
    )
    assert "sharded: user.weight, 1 whole" in summarize(Plan(2, tuple(few), ()))
    assert len(summarize(Plan(1, tuple(few), ()))) <= LONGEST
    assert summarize(Plan(2, (), ())).startswith("0 tables sharded, 0 whole; a rank sends 0 B per step")


def test_the_report_says_how_to_shard_a_whole_table_and_how_to_have_the_plan_again() -> None:
    slower = Candidate("alltoall", "", 100, 3.0, 0, "3.00 times the time")
    told = give_advice(Plan(2, (table("item.weight", "allreduce", (slower,)),), ()))
    assert 'strategy={"item.weight": "alltoall"} would shard item.weight for +2.0 ms a step' in told
    assert 'compile(model, plan="plan.json") repeats it' in told


def test_dense_parameters_share_a_row_of_the_report_and_have_their_own_in_the_plan() -> None:
    dense = [
        Decision(f"layers.{k}.weight", (8, 8), False, "allreduce", "dense gradient", 256, 256, 0.1) for k in range(40)
    ]
    frozen = Decision("frozen.weight", (8,), False, "frozen", "takes no gradient", 0, 0, 0.0)
    plan = Plan(2, (table("user.weight", "alltoall"), *dense, frozen), ())

    assert all(f"layers.{k}.w" in str(plan) for k in (0, 39))  # a narrow terminal may wrap the rest of a name
    folded = render(plan, folded=True)
    assert "40 others" in folded
    assert "2,560 in all" in folded
    assert "10.0 KiB" in folded
    assert "layers." not in folded
    assert "frozen.weight" in folded
    assert "<pre" in plan._repr_html_()


def test_the_report_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(2, (table("user.weight", "alltoall"),), ())
    monkeypatch.setattr("sys.stdout.fileno", lambda: 1)
    for columns in (80, 100, 180):
        monkeypatch.setattr("os.get_terminal_size", lambda _, columns=columns: os.terminal_size((columns, 24)))
        assert max(map(len, str(plan).splitlines())) <= columns
    monkeypatch.setattr("sys.stdout", None)  # as in a daemon
    assert "user.weight" in str(plan)
