"""Strategies that are asked for, by name or by pattern."""

from __future__ import annotations

import pytest

from embrace_fx.passes.planner.asked_strategies import Strategy, requested_strategies
from embrace_fx.vocabulary.plan import Grid
from tests.support.planned import TABLE


def test_patterns_are_applied_in_order() -> None:
    tables = ("encoder.words.weight", "decoder.words.weight", "positions.weight")
    found = requested_strategies({"*.words.*": "alltoall", "decoder.*": "allreduce"}, tables)
    assert list(found.values()) == ["alltoall", "allreduce", "auto"]
    assert set(requested_strategies("alltoall", tables).values()) == {"alltoall"}
    assert requested_strategies("alltoall", ()) == {}


def test_a_tied_parameter_is_asked_for_by_any_of_its_names() -> None:
    tied = {"head.weight": "words.weight"}
    for pattern in ("head.weight", "words.*", "head.*"):
        found = requested_strategies({pattern: "vocabulary"}, ("words.weight",), ("words.weight", "body.weight"), tied)
        assert found == {"words.weight": "vocabulary", "body.weight": "auto"}
    assert requested_strategies({"head.*": "alltoall"}, ("words.weight",), (), tied) == {"words.weight": "alltoall"}
    with pytest.raises(ValueError, match="matches no table"):
        requested_strategies({"head.*": "alltoall"}, (), ("words.weight",), tied)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("all_to_all", r"no strategy 'all_to_all', which was passed for '\*'"),
        ({TABLE: "sharded"}, r"no strategy 'sharded', which was passed for 'table\.weight'"),
        ({"words": "alltoall"}, r"the pattern 'words' matches no table.*table\.weight"),
        ({"word*": "zen"}, r"the pattern 'word\*' matches no table or another.*table\.weight"),
    ],
)
def test_a_strategy_that_does_not_exist(strategy: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        requested_strategies(strategy, (TABLE,))


def test_other_parameters_are_named_by_patterns_alone() -> None:
    def of(strategy: Strategy) -> dict[str, str | Grid]:
        return requested_strategies(strategy, ("words.weight",), ("words.weight", "linear.weight"))

    assert of("zen") == {"words.weight": "zen", "linear.weight": "auto"}
    assert of({"*": "zen"}) == {"words.weight": "zen", "linear.weight": "zen"}
    assert of({"*": "alltoall"}) == {"words.weight": "alltoall", "linear.weight": "auto"}
    with pytest.raises(ValueError, match=r"'linear\.\*' matches no table.*words\.weight"):
        of({"linear.*": "alltoall"})


def test_a_pattern_for_a_model_without_tables() -> None:
    with pytest.raises(ValueError, match="There are no tables"):
        requested_strategies({"*": "alltoall"}, ())
