"""What stands for sizes: hints, expected numbers for whole expressions, one number where neither is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from embrace_fx.vocabulary.sizes import NOTHING_EXPECTED, UNKNOWN_SIZE, ExpectedSizes, RowCounts, is_known


@pytest.fixture
def unknown() -> Any:
    """Returns an unbacked symbolic size."""
    return ShapeEnv().create_unbacked_symint()


def test_whole_expressions_are_counted(unknown: Any) -> None:
    expected = ExpectedSizes({str(unknown.node.expr): 3 * 128})
    sizes = (unknown, unknown // 128, 5 * (unknown // 128), unknown * unknown)
    assert [expected.number(size) for size in sizes] == [384, 3, 15, 384 * 384]


def test_what_is_not_known_has_one_number(unknown: Any) -> None:
    other = unknown.node.shape_env.create_unbacked_symint()
    expected = ExpectedSizes({str(unknown.node.expr): 384})
    assert [NOTHING_EXPECTED.number(size) for size in (unknown, unknown // 128)] == [UNKNOWN_SIZE] * 2
    assert [expected.number(size) for size in (other, other + unknown)] == [UNKNOWN_SIZE] * 2


def test_the_captures_sizes_stay_and_get_no_guards(unknown: Any) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC] * 2)
    rows, columns = mode.from_tensor(torch.empty(6, 8), symbolic_context=context).shape
    assert mode.shape_env is not None
    expected = ExpectedSizes({str(rows.node.expr): 99})  # type: ignore[attr-defined]
    assert [expected.number(size) for size in (rows, rows * columns, 7)] == [6, 48, 7]
    assert [is_known(size) for size in (rows, 7, unknown, unknown // 2)] == [True, True, False, False]
    assert not mode.shape_env.guards


def test_rows_of_which_nothing_is_known() -> None:
    assert RowCounts.unknown(1000, 2) == RowCounts(UNKNOWN_SIZE, 2 * UNKNOWN_SIZE, 2 * UNKNOWN_SIZE)
    assert RowCounts.unknown(10, 2) == RowCounts(10, 20, 10)
