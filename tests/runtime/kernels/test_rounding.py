"""Rounding to the formats on the wire: how far numbers are off, that they stay what they have been rounded to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.cost.wire import FORMATS, Format, Wire
from embrace_fx.runtime.kernels.rounding import Pieces, as_blocks, encode, round_trip

PIECES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=5)
ROUNDED = [each for each in FORMATS if each != "exact"]
LARGEST_ERROR = {"bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 127}
"""Of the largest number of a piece."""


def drawn(pieces: Pieces, seed: int) -> Tensor:
    """Returns random numbers of very different magnitudes."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(rows * columns for rows, columns in pieces), generator=random)
    return values * 2.0 ** torch.randint(-9, 9, values.shape, generator=random)


@pytest.mark.parametrize("form", ROUNDED)
@given(PIECES, st.integers(0, 2**20))
def test_numbers_are_off_by_a_share_of_their_piece(form: Format, pieces: Pieces, seed: int) -> None:
    values = drawn(pieces, seed)
    found = round_trip(values, pieces, form)
    at = 0
    for rows, columns in pieces:
        of_piece = slice(at, at := at + rows * columns)
        of_rows, off = (each[of_piece].view(rows, columns).abs() for each in (values, found - values))
        if columns:
            assert (off <= LARGEST_ERROR[form] * of_rows.amax(1, keepdim=True)).all()


@pytest.mark.parametrize("form", ROUNDED)
@given(PIECES, st.integers(0, 2**20))
def test_what_is_rounded_stays_as_it_is(form: Format, pieces: Pieces, seed: int) -> None:
    once = round_trip(drawn(pieces, seed), pieces, form)
    assert torch.equal(round_trip(once, pieces, form), once)


@pytest.mark.parametrize("form", ROUNDED)
@given(PIECES)
def test_the_wire_takes_the_bytes_that_are_planned(form: Format, pieces: Pieces) -> None:
    sent = encode(drawn(pieces, 0), pieces, form)
    assert sent.nbytes == sum(rows * Wire(4, form).row_bytes(columns) for rows, columns in pieces)


def test_blocks_of_a_dense_tensor_take_the_bytes_that_are_planned() -> None:
    values = drawn([(1, 1000)], 0)
    assert encode(values, as_blocks(1000), "int8").nbytes == Wire(4, "int8").dense_bytes(1000) == 1004
