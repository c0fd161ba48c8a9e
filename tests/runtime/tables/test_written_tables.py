"""Sharded tables written through references that the user kept: as the plain model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adagrad

import embrace_fx
from embrace_fx.vocabulary.plan import Grid
from tests.support.cases import long_but
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import SEED, whole_parameters

DTYPE = torch.float64
ROWS, STEPS, WRITTEN_AFTER = 30, 7, 3


class Two(nn.Module):
    """Two tables, which may travel as a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, 6)
        self.other = nn.Embedding(ROWS, 6)
        self.linear = nn.Linear(6, 1)

    def forward(self, ids_B: Tensor) -> Tensor:
        return self.linear(self.one(ids_B) + self.other(ids_B + 1)).square().mean()


def _write(plain: Two, model: Any, how: str) -> None:
    if how == "synchronized":
        model.synchronize()
    if how == "loaded":
        state = plain.state_dict()
        plain.load_state_dict({name: 0.5 * value if "one" in name else value for name, value in state.items()})
        return
    with torch.no_grad():
        plain.one.weight.mul_(0.5)


def _train(rank: int, world_size: int, how: str, options: dict[str, Any] | None) -> dict[str, Tensor]:
    """Halves a table between two steps; without options the plain model."""
    torch.manual_seed(SEED)
    plain = Two().to(DTYPE)
    optimizer = Adagrad(plain.parameters(), 0.5, eps=1e-3)
    model: Any = plain if options is None else embrace_fx.compile(plain, optimizer=optimizer, **options)
    random = torch.Generator().manual_seed(rank)
    batches = [torch.randint(ROWS - 1, (9,), generator=random) for _ in range(STEPS)]
    for step, batch in enumerate(batches if options is None else model.lookahead(batches)):
        model(batch).backward()
        if options is None:
            for parameter in plain.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        if how == "before the step" and step == WRITTEN_AFTER:
            _write(plain, model, how)
        optimizer.step()
        optimizer.zero_grad()
        if how != "before the step" and step == WRITTEN_AFTER:
            _write(plain, model, how if options is not None or how == "loaded" else "")
    return whole_parameters(model)


WAYS: dict[str, dict[str, Any]] = {
    **{
        f"alltoall, {schedule}": {"strategy": "alltoall", "schedule": schedule}
        for schedule in ("2d", "vertical", "none")
    },
    "grid, 2d": {"strategy": {"one.*": Grid(2, 1), "other.*": Grid(2, 1)}},
}


WRITTEN = {
    f"{way}, {how}": (way, how)
    for way in WAYS
    for how in ("synchronized", "loaded", "before the step", "after the step")
    if not (way.startswith("grid") and how == "loaded")  # the plain model cannot put columns on a grid
}


@pytest.mark.parametrize(
    ("way", "how"),
    long_but(("alltoall, 2d, synchronized", "alltoall, 2d, loaded", "alltoall, 2d, after the step"), WRITTEN),
)
def test_a_table_may_be_written_whatever_of_it_is_pending(way: str, how: str) -> None:
    """Rows that left for the next batch before are read anew."""
    for found, expected in zip(run_ranks(2, _train, how, WAYS[way]), run_ranks(2, _train, how, None), strict=True):
        assert_same(found, expected, DTYPE)
