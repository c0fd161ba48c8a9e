"""Rounds numbers to the formats in which they are sent ("bf16", "fp16", "int8"), and converts them back.

Contract
    "int8": a piece of a row becomes its numbers in 8 bits, followed by the exponent of their common power of two, the
    smallest for which the largest number fits in 127 (like MXINT8 of the OCP microscaling formats, with the piece as a
    block). Rounding is idempotent.
    Non-finite numbers stay non-finite: under "int8" their whole piece becomes nan. Under "fp16", numbers above 65,504
    become infinite.

Shape legend: a flat tensor contains consecutive pieces; `pieces` has (rows, columns) of each run of equal pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from embrace_fx.cost.wire import BLOCK, Format

Pieces = Sequence[tuple[int, int]]
"""(rows, columns) of consecutive parts of a flat tensor."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}

_LEAST, _NOT_FINITE = -119, 127
"""The minimum exponent, whose reciprocal float32 can represent; and the code for non-finite numbers."""


def wire_elements(rows: int, columns: int, form: Format) -> int:
    """Returns the number of elements in the encoded tensor of `rows` x `columns` values in this format."""
    return rows * (columns + 1) if form == "int8" and columns else rows * columns


def encode(flat: Tensor, pieces: Pieces, form: Format) -> Tensor:
    """Rounds a flat tensor to the format in which it is sent. Returns the rounded values as a flat tensor.

    Args:
        pieces: the shapes (rows, columns) of consecutive parts of `flat`. "int8" chooses a scale for each row of a
            piece.
        form: "bf16", "fp16" or "int8".
    """
    if form != "int8":
        return flat.to(DTYPES[form])
    sent = flat.new_empty((sum(wire_elements(*piece, form) for piece in pieces),), dtype=torch.int8)
    for values, coded in _equal_width_runs(flat, sent, pieces):
        values = values.float()
        exponents = _exponents(values)
        coded[:, :-1] = (values * _power_of_two(-exponents)[:, None]).round_()
        coded[:, -1] = exponents
    return sent


def decode_into(out: Tensor, sent: Tensor, pieces: Pieces, form: Format) -> Tensor:
    """Decodes a tensor that `encode` has returned.

    Args:
        out: the flat tensor to write.
        sent: the result of `encode`.
        pieces, form: as for `encode`.
    """
    if form != "int8":
        return out.copy_(sent)
    for values, coded in _equal_width_runs(out, sent, pieces):
        exponents = coded[:, -1].int()
        powers = torch.where(exponents == _NOT_FINITE, torch.nan, _power_of_two(exponents))
        values.copy_(coded[:, :-1] * powers[:, None])
    return out


def round_trip(flat: Tensor, pieces: Pieces, form: Format) -> Tensor:
    """Returns the values that a receiver gets if a flat tensor is rounded and sent, by calling `encode` and
    `decode_into`.

    Args:
        pieces, form: as for `encode`.
    """
    return decode_into(torch.empty_like(flat), encode(flat, pieces, form), pieces, form)


def as_blocks(elements: int) -> Pieces:
    """Divides the elements of a dense tensor into blocks of `BLOCK` elements, each of which is rounded separately.

    Returns:
        The shapes (rows, columns) of two consecutive parts of the flat tensor: all full blocks, and the shorter last
            block. Each row of a part is one block.
    """
    return [(elements // BLOCK, BLOCK), (1, elements % BLOCK)]


def _exponents(values: Tensor) -> Tensor:
    """Returns the exponent e of the quantization step 2^e of each row of `values`, as int32 (rows,). For a row that has
    infinite or nan values, the exponent is `_NOT_FINITE`.
    """
    largest = values.abs().amax(1)
    mantissa, exponents = torch.frexp(largest)  # largest = mantissa * 2 ** exponent, 0.5 <= mantissa < 1
    steps = (exponents - 6 - (mantissa <= 127 / 128).int()).clamp_(_LEAST, _NOT_FINITE - 1)
    return torch.where(largest.isfinite(), steps, _NOT_FINITE)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Returns 2 ** exponents exactly, by writing the exponent bits of float32 numbers."""
    return (exponents.clamp(-126, 127).add_(127) << 23).view(torch.float32)


def _equal_width_runs(flat: Tensor, sent: Tensor, pieces: Pieces) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (values (rows, columns), encoded values (rows, columns + 1)), one pair for each run of consecutive pieces
    with equal numbers of columns.

    Args:
        flat, sent: the flat tensors of values and of encoded values. The yielded tensors are views of them.
        pieces: the shapes (rows, columns) of consecutive parts of `flat`.
    """
    at = of_codes = 0
    for columns, run in groupby((piece for piece in pieces if piece[0] and piece[1]), key=lambda piece: piece[1]):
        rows = sum(each for each, _ in run)
        values = flat[at : at + rows * columns].view(rows, columns)
        coded = sent[of_codes : of_codes + rows * (columns + 1)].view(rows, columns + 1)
        at, of_codes = at + values.numel(), of_codes + coded.numel()
        yield values, coded
