"""Batches in which rows of a table rest: row k of those added to it is read twice, k steps apart, for every k.

step t <  STEPS/2: rows STEPS-1-2t and STEPS-2-2t are read for the first time, two in each step
step t >= STEPS/2: rows 2t-STEPS+1 and 2t-STEPS+2 for the second time
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.support.models import BagRecommenderWorkload, Batch, TransformerEncoderWorkload, TwoTableLMWorkload, Workload

STEPS = 50


def resting(step: int) -> tuple[int, int]:
    """The rows that are read in a step, besides others: each k in 1 .. STEPS - 1 in two steps, k apart."""
    first = STEPS - 2 - 2 * step if 2 * step < STEPS else 2 * step - STEPS + 1
    return first, first + 1


@dataclass(frozen=True)
class Resting:
    """A workload whose first table has `STEPS` + 1 rows more, which rest.

    Attributes:
        sized: the field of the workload that says how many rows it has.
        rows: of the table without them.
    """

    workload: Workload
    sized: str
    rows: int
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        changed: dict[str, Any] = {self.sized: self.rows + STEPS + 1}
        return replace(self.workload, **changed).make(dtype, seed)  # type: ignore[type-var]

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        """The workload's, some ids exchanged: the odd row on every rank, the even one on the first."""
        ids, *rest = self.workload.batches(step, rank, seed)
        ids = ids.clone()
        for column, k in enumerate(resting(step)):
            if rank == 0 or k % 2:
                ids[0, column] = self.rows + k
        return ids, *rest


RESTING = {
    "two_table_lm": Resting(TwoTableLMWorkload(length=4), "num_words", 60),
    "transformer_encoder": Resting(TransformerEncoderWorkload(), "num_words", 50),
    "bag_recommender": Resting(BagRecommenderWorkload(), "num_items", 70),
}
