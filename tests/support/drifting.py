"""Two tables whose batches read few rows, then most of them, then few again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from embrace_fx.cost.links import Cluster, Link
from embrace_fx.passes.planner.replanning import CONFIRMED_BY, LOOK_EVERY
from embrace_fx.session import batch_check, programs

ROWS, WIDTH = 120, 10
FEW, MOST = 8, 400
"""Ids of a batch: of 8, each row is read by few; of 400, nearly all are read by each rank."""

LINKS = Cluster(50.0, 1e-3, links=(("all_to_all", Link(20.0, 1e-3)), ("all_reduce", Link(50.0, 1e-3))))
"""So narrow that bytes alone count, and pairwise messages reach less than a ring, as they do on real networks."""

PATIENCE = LOOK_EVERY * (CONFIRMED_BY + 1)
"""Samples after a strong shift by which another plan is in place; here every call is one."""
SPARSE, DENSE = range(8), range(8, 8 + PATIENCE + 8)
SPARSE_AGAIN = range(DENSE.stop, DENSE.stop + PATIENCE + 20)
TABLE, OTHER = "drifting.weight", "steady.weight"


class Words(nn.Module):
    """Two tables: batches read a changing number of rows of the first one, and always few rows of the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.drifting = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.steady = nn.Embedding(400, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, steady_ids: Tensor) -> Tensor:
        x = self.linear(self.drifting(ids)).tanh()
        return (x.mean(0) * self.steady(steady_ids)).sum(-1).square().mean() + x.square().mean()


class Together(Words):
    """Both tables are read at once and have no padding row: a stack, while both are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.drifting = nn.Embedding(ROWS, WIDTH)

    def forward(self, ids: Tensor, steady_ids: Tensor) -> Tensor:
        rows, steady = self.drifting(ids), self.steady(steady_ids)
        x = self.linear(rows).tanh()
        return (x.mean(0) * steady).sum(-1).square().mean() + x.square().mean()


@contextmanager
def every_call_a_sample() -> Iterator[None]:
    """Lets the planner check its plan in every call."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (programs, batch_check):
            patch.setattr(module, "SAMPLED_EVERY", 1)
        patch.setattr(programs, "ONCE_IN", 0)
        yield


Batch = tuple[Tensor, Tensor]


def batch(step: int, rank: int) -> Batch:
    random = torch.Generator().manual_seed(1000 * step + rank)
    count = MOST if step in DENSE else FEW
    return torch.randint(ROWS, (count,), generator=random), torch.randint(400, (6,), generator=random)


def make(seed: int = 0, kind: type[Words] = Words) -> Words:
    torch.manual_seed(seed)
    return kind().double()
