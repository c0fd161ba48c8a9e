"""What rounding leaves out of gradients is sent later: of buckets all of it, of rows where they are read again."""

from __future__ import annotations

import torch

from embrace_fx.runtime.kernels.rounding import Pieces, as_blocks, decode_into
from embrace_fx.runtime.ranks.wire_rounding import Rounding


def test_a_row_that_comes_again_makes_good_what_was_left_out() -> None:
    rounding, ids, rows = Rounding("int8"), torch.tensor([7]), torch.tensor([[1.003, 100.4]])
    first, second = (rounding.round_rows(rows, ids, "int8", 2, "words") for _ in range(2))
    assert first.tolist() == [[1.0, 100.0]]
    assert second.tolist() == [[1.0, 101.0]]


def test_rows_sent_again_and_again_are_right_in_the_mean() -> None:
    """The padding row comes first, as the row with the smallest number; other rows come and go."""
    rounding, random = Rounding("int8"), torch.Generator().manual_seed(0)
    rows, sent = torch.randn(3, 6, generator=random), torch.zeros(3, 6)
    for step in range(64):
        ids = torch.tensor([9, 2, 5, 20 + step])
        more = torch.cat([rows, torch.randn(1, 6, generator=random)])
        sent += rounding.round_rows(more, ids, "int8", 2, "words")[:3]
    largest = rows.abs().max()
    assert (sent / 64 - rows).abs().max() < largest / 127 / 32
    assert (
        rounding.round_rows(rows, torch.tensor([40, 41, 42]), "int8", 2, "words") - rows
    ).abs().max() > largest / 999


def test_buckets_are_right_in_the_mean_and_forget_when_they_are_told() -> None:
    rounding, pieces = Rounding("int8"), as_blocks(300)
    flat, sent = torch.randn(300, generator=torch.Generator().manual_seed(0)), torch.zeros(300)
    first = _arrived(rounding, flat, pieces)
    for _ in range(63):
        sent += _arrived(rounding, flat, pieces)
    assert ((sent + first) / 64 - flat).abs().max() < flat.abs().max() / 127 / 32
    assert not torch.equal(_arrived(rounding, flat, pieces), first)
    rounding.forget()
    assert torch.equal(_arrived(rounding, flat, pieces), first)


def test_a_gradient_that_is_not_finite_leaves_nothing_behind() -> None:
    rounding, bad = Rounding("int8"), torch.tensor([[torch.inf, 1.0]])
    rounding.round_rows(bad, torch.tensor([1]), "int8", 1, "words")
    _arrived(rounding, bad.view(-1), [(1, 2)])
    assert rounding.round_rows(torch.ones(1, 2), torch.tensor([1]), "int8", 1, "words").tolist() == [[1.0, 1.0]]
    assert _arrived(rounding, torch.ones(2), [(1, 2)]).tolist() == [1.0, 1.0]


def _arrived(rounding: Rounding, flat: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    sent = rounding.rounded_bucket(flat, pieces, "bucket 0 [0]")
    return decode_into(torch.empty_like(flat), sent, pieces, rounding.form)
