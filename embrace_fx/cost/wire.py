"""Bytes of numbers in wire formats."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

Format = Literal["exact", "bf16", "fp16", "int8"]
"""Formats on the wire: as in memory; rounded to 16 bits; rounded to 8 bits, with a power of two per piece."""

FORMATS: tuple[Format, ...] = get_args(Format)

BLOCK = 256
"""Elements of a dense gradient that share a power of two, under "int8"."""


@dataclass(frozen=True)
class Wire:
    """The format in which numbers are sent, and the number of bytes that they take in a message.

    Attributes:
        itemsize: bytes of a number in memory.
        form: the format to send, used only if its numbers are narrower than those in memory.
    """

    itemsize: int
    form: Format = "exact"

    @property
    def is_narrower(self) -> bool:
        """Whether numbers take fewer bytes in a message than in memory."""
        return self.form != "exact" and self.itemsize > (1 if self.form == "int8" else 2)

    def row_bytes(self, columns: int) -> int:
        """Returns the bytes that `columns` numbers of one row take in a message, including the row's scale in
        "int8".
        """
        if not self.is_narrower or not columns:
            return columns * self.itemsize
        return columns + 1 if self.form == "int8" else 2 * columns

    def dense_bytes(self, elements: int) -> int:
        """Returns the bytes that a dense gradient of `elements` numbers takes in a message."""
        if not self.is_narrower:
            return elements * self.itemsize
        return elements + ceil(elements / BLOCK) if self.form == "int8" else 2 * elements
