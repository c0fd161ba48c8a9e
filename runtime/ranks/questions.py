"""Announces reads of sharded tables, so that a read that only some ranks make raises at once on all ranks.

    rank 0   computes a norm: announces it        rank 0, rank 1   raise the same error
    rank 1   calls the model: announces that

Contract
    A question uses the exchange of announcements, so that it matches whatever another rank announces instead. It
    carries a few numbers. More numbers, or those on a device, use a separate collective after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.ranks.failure import place_of_main_thread


@dataclass(frozen=True, slots=True)
class SharedRead:
    """A read of a sharded table, which all ranks must make together.

    Attributes:
        what: a description of the read, such as "norm of the sharded words.weight"; equal on all ranks.
        value: this rank's value, to be reduced over ranks, or None if the read is not a reduction.
        reduce_op: the reduction over ranks, such as `dist.ReduceOp.SUM`.
    """

    what: str
    value: Tensor | None
    reduce_op: Any

    @property
    def hash(self) -> int:
        """A hash of the read. Ranks compare it to check that all of them make the same read."""
        return crc32(f"{self.what} {self.reduce_op}".encode())

    def error_if_alone(self) -> str:
        """Returns the text of the error to raise if only some ranks make this read."""
        text = _LOSS_ALONE if self.what.startswith("loss of logits") else _ALONE
        return text.format(self.what, place_of_main_thread())

    def encode_value(self, most: int) -> tuple[int, ...]:
        """Encodes this rank's value as 64-bit integers, one for each element, to be sent with the announcement of the
        read. Returns () if there is no value, or if it is complex, not on the CPU, or has more than `most` elements.
        """
        value = self.value
        if value is None or not 0 < value.numel() <= most or value.device.type != "cpu" or value.is_complex():
            return ()
        return tuple(value.detach().reshape(-1).to(_widest_dtype(value)).view(torch.int64).tolist())

    def reduce_values(self, numbers: Sequence[Sequence[int]]) -> Tensor | None:
        """Reduces the values of all ranks to one value. Returns None if no values were sent.

        Args:
            numbers: for each rank, the result of `encode_value`.
        """
        value = self.value
        if value is None or not numbers[0]:
            return None
        everyone = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(_widest_dtype(value)).to(value.dtype)
        if self.reduce_op == dist.ReduceOp.SUM:
            found = everyone.sum(0, dtype=value.dtype)
        else:
            found = everyone.amax(0) if self.reduce_op == dist.ReduceOp.MAX else everyone.amin(0)
        return found.view(value.shape)


def _widest_dtype(value: Tensor) -> torch.dtype:
    """Returns float64 if `value` is a floating-point tensor, or int64 if it is an integer tensor."""
    return torch.float64 if value.is_floating_point() else torch.int64


_LOSS_ALONE = (
    "only some ranks compute the {}, at {}. Compute the same loss on every rank. On a rank without labels, pass labels "
    "that all equal ignore_index. Or do not shard the table: strategy='allreduce'"
)
_ALONE = (
    "only this rank reads a sharded table: {}, at {}. Read the table on every rank, even if only one rank logs the "
    "result. Or call model.full_state_dict() on every rank, and read the table from the result"
)
