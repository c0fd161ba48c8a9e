"""Rounds numbers to the formats in which they travel, and back.

Contract
    "int8": a piece of a row becomes its numbers in 8 bits and, behind them, the exponent of the power of two that they
    are multiples of: the smallest that holds the largest of them in 127 (as MXINT8 of the OCP microscaling formats,
    with the piece for a block). What is rounded once stays as it is when it is rounded again.
    Numbers that are not finite stay so: under "int8" their whole piece is nan. Under "fp16" larger ones than 65,504
    become infinite.

Shape legend: a flat tensor holds pieces one behind the other, `pieces` says (rows, columns) of each run of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from embrace_fx.cost.wire import BLOCK, Format

Pieces = Sequence[tuple[int, int]]
"""(rows, columns) of parts of a flat tensor."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}

_LEAST, _NOT_FINITE = -119, 127
"""Exponents: of the smallest step, whose reciprocal float32 holds; and what stands for numbers that are not finite."""


def wire_elements(rows: int, columns: int, form: Format) -> int:
    """Counts the elements on the wire of so many rows of so many columns."""
    return rows * (columns + 1) if form == "int8" and columns else rows * columns


def encode(flat: Tensor, pieces: Pieces, form: Format) -> Tensor:
    """Rounds a flat tensor of floating-point numbers to its form on the wire."""
    if form != "int8":
        return flat.to(DTYPES[form])
    sent = flat.new_empty((sum(wire_elements(*piece, form) for piece in pieces),), dtype=torch.int8)
    for values, coded in _runs(flat, sent, pieces):
        values = values.float()
        exponents = _exponents(values)
        coded[:, :-1] = (values * _power_of_two(-exponents)[:, None]).round_()
        coded[:, -1] = exponents
    return sent


def decode_into(out: Tensor, sent: Tensor, pieces: Pieces, form: Format) -> Tensor:
    """Writes what `encode` has made into a flat tensor."""
    if form != "int8":
        return out.copy_(sent)
    for values, coded in _runs(out, sent, pieces):
        exponents = coded[:, -1].int()
        powers = torch.where(exponents == _NOT_FINITE, torch.nan, _power_of_two(exponents))
        values.copy_(coded[:, :-1] * powers[:, None])
    return out


def rounded(flat: Tensor, pieces: Pieces, form: Format) -> Tensor:
    """Returns a flat tensor's numbers as they arrive."""
    return decode_into(torch.empty_like(flat), encode(flat, pieces, form), pieces, form)


def in_blocks(elements: int) -> Pieces:
    """Cuts a dense tensor into pieces."""
    return [(elements // BLOCK, BLOCK), (1, elements % BLOCK)]


def _exponents(values: Tensor) -> Tensor:
    """(rows,) int32: of the step of each row."""
    largest = values.abs().amax(1)
    mantissa, exponents = torch.frexp(largest)  # largest = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
    steps = (exponents - 6 - (mantissa <= 127 / 128).int()).clamp_(_LEAST, _NOT_FINITE - 1)
    return torch.where(largest.isfinite(), steps, _NOT_FINITE)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2 ** exponents, in every bit: float32 from their exponents' bits."""
    return (exponents.clamp(-126, 127).add_(127) << 23).view(torch.float32)


def _runs(flat: Tensor, sent: Tensor, pieces: Pieces) -> Iterator[tuple[Tensor, Tensor]]:
    """Matrices of values, and of their codes, for pieces of one width that follow on each other."""
    at = of_codes = 0
    for columns, run in groupby((piece for piece in pieces if piece[0] and piece[1]), key=lambda piece: piece[1]):
        rows = sum(each for each, _ in run)
        values = flat[at : at + rows * columns].view(rows, columns)
        coded = sent[of_codes : of_codes + rows * (columns + 1)].view(rows, columns + 1)
        at, of_codes = at + values.numel(), of_codes + coded.numel()
        yield values, coded
