"""Golden texts: equal, different, missing, updated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import golden
from tests.support.golden import check_golden


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(golden, "GOLDEN_DIR", tmp_path)
    monkeypatch.setattr(golden.options, "update", False)
    return tmp_path


def test_a_missing_golden_fails_and_says_what_to_do(folder: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"(?s)tests/golden/a\.txt, found none.*--update-golden.*the text"):
        check_golden("a", "the text")
    assert not (folder / "a.txt").exists()


def test_an_updated_golden_is_equal_and_a_different_text_shows_as_a_diff(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden.options, "update", True)
    check_golden("passes/b", "one\ntwo\nthree")
    monkeypatch.setattr(golden.options, "update", False)
    check_golden("passes/b", "one\ntwo\nthree\n")
    with pytest.raises(pytest.fail.Exception, match=r"(?s)--- tests/golden/passes/b\.txt.* one\n-two\n\+2\n three"):
        check_golden("passes/b", "one\n2\nthree")
    assert (folder / "passes" / "b.txt").read_text() == "one\ntwo\nthree\n"
