"""The plan as data: what it can be asked, what ranks compare, how it prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from embrace_fx.cost.links import Cluster, Link
from embrace_fx.cost.sparsity import Sparsity
from embrace_fx.vocabulary.joined_table import JoinedTable
from embrace_fx.vocabulary.plan import Candidate, Decision, Grid, Plan
from embrace_fx.vocabulary.sizes import RowCounts
from tests.support.golden import check_golden

MIB = 2**20

PLAN = Plan(
    world_size=4,
    decisions=(
        Decision("project.weight", (512, 256), False, "allreduce", "dense gradient", 786_432, 786_432, 0.55),
        Decision("scale", (), False, "frozen", "takes no gradient", 0, 0, 0.0),
        Decision(
            "words.weight",
            (60_000, 256),
            True,
            "alltoall",
            "1200 of 60000 rows read (2.00%), 64 columns per rank",
            1_900_000,
            88 * MIB,
            0.91,
        ),
        Decision(
            "positions.weight",
            (512, 256),
            True,
            "allreduce",
            "its ids do not depend on the batch",
            786_432,
            786_432,
            0.55,
        ),
    ),
    buckets=(("project.weight", "positions.weight"),),
    renormed=(),
)


def test_golden() -> None:
    check_golden("plan", "\n".join(map(str, (PLAN, full_plan(), Plan(1, (), ())))))


def test_candidates_are_explained() -> None:
    candidates = (
        Candidate("alltoall", "", 1_900_000, 0.91, 20 * MIB, ""),
        Candidate("zen", "hierarchical", 4_000_000, 1.3, 120 * MIB, "1.43 times the time"),
        Candidate("allreduce", "", 88 * MIB, 30.0, 117 * MIB, "32.97 times the time"),
    )
    lying = str(Sparsity(30_000, 512, 4, (600, 600), (600.0, 900.0), 2.0, 1.5, draws_per_unit=3.2))
    plans = (_with(2, candidates=candidates, measured=lying), full_plan(), PLAN, replace(PLAN, world_size=1))
    check_golden("plan_explained", "\n".join(plan.explain() for plan in plans))


def _with(position: int, **changes: object) -> Plan:
    decisions = list(PLAN.decisions)
    decisions[position] = replace(decisions[position], **changes)  # type: ignore[arg-type]
    return replace(PLAN, decisions=tuple(decisions))


@pytest.mark.parametrize(
    "other",
    [
        replace(PLAN, world_size=3),
        replace(PLAN, buckets=(("positions.weight", "project.weight"),)),
        replace(PLAN, renormed=("positions.weight",)),
        replace(PLAN, decisions=PLAN.decisions[::-1]),
        _with(2, strategy="allreduce"),
        _with(2, shape=(60_000, 128)),
        _with(2, scheme="balanced"),
        replace(PLAN, links=Cluster(latency_ms=1.0)),
    ],
    ids=["world size", "bucket order", "renormed", "order", "strategy", "shape", "scheme", "links"],
)
def test_what_ranks_must_agree_on_changes_the_digest(other: Plan) -> None:
    assert other.digest() != PLAN.digest()


def test_predictions_and_reasons_are_not_agreed_on() -> None:
    candidate = Candidate("alltoall", "", 1, 9.0, 1, "")
    assert _with(2, candidates=(candidate,)).digest() == PLAN.digest()
    assert _with(2, reason="requested", sent_bytes_per_step=1, predicted_ms=9.0).digest() == PLAN.digest()
    assert _with(2, rows=RowCounts(1, 2, 2)).digest() == PLAN.digest()


def full_plan() -> Plan:
    """Returns a plan in which every field is set."""
    chosen = Candidate("alltoall", "", 1024, 0.5, 2**31, "", Grid(2, 2))
    candidates = (chosen, Candidate("zen", "balanced", 8, 1.0, 6, "slow"))
    links = Cluster(1e6, 0.1, (("all_to_all", Link(1e5, 0.2, 0.3)),), 2, Link(1e7, 0.01))
    return replace(
        _with(2, grid=Grid(2, 2), candidates=candidates, measured="evenly", rows=RowCounts(1200, 4000, 2900)),
        chosen_because="2d: 3.0 ms a step",
        renormed=("positions.weight",),
        links=links,
        links_are="probed",
        watched=("words.weight",),
        history=("before",),
        spaces=(JoinedTable(("words.weight", "items.weight"), (0, 60_000, 70_000)),),
    )


def test_a_saved_plan_is_the_same_plan(tmp_path: Path) -> None:
    full_plan().save(tmp_path / "plan.json")
    found = Plan.load(tmp_path / "plan.json")
    assert found == full_plan()
    assert found.digest() == full_plan().digest()


def test_a_plan_saved_without_rows_is_read(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    content = json.loads((tmp_path / "plan.json").read_text())
    for decision in content["value"]["decisions"]:
        del decision["rows"]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert PLAN.rows == {}
    assert full_plan().rows == {"words.weight": RowCounts(1200, 4000, 2900)}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        ("{", "Expecting property name"),
        ("[]", "does not contain a saved Plan"),
        ('{"what": "Plan", "value": {"world_size": "2"}}', r"Plan\.world_size is '2'"),
        ('{"what": "Plan", "value": {"ranks": 2}}', r"has unknown fields \['ranks'\]"),
        ('{"what": "Plan", "value": {"world_size": 2}}', "missing 2 required"),
    ],
)
def test_a_file_that_holds_no_plan_is_told(content: str | None, told: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ValueError, match=rf"plan\.json is not a plan.*: .*{told}.*Save it again"):
        Plan.load(tmp_path / "plan.json")
