"""The list of long cases names tests that there are."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import LONG_TESTS

ROOT = Path(__file__).parents[2]


def test_each_case_is_of_a_test_that_exists() -> None:
    cases = LONG_TESTS.read_text(encoding="utf-8").splitlines()

    assert cases == sorted(set(cases))
    for case in cases:
        file, _, name = case.partition("::")
        source = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in source, case
