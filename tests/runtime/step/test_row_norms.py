"""Row-wise Adagrad over shards: one exchange a step for all tables, priced, scheduled and seen where it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.runtime.tables.table_shard import TableShard
from embrace_fx.vocabulary.operation_id import ROW_NORMS
from embrace_fx.vocabulary.schedule import SCHEDULES, ScheduleName
from tests.support.cases import long_but
from tests.support.ranks import run_ranks
from tests.support.wire import TOLERANCE, bytes_per_step, sent_by_connection

ROWS, WIDTHS, BATCH = 3000, (8, 12, 20), 400


class Recommender(nn.Module):
    """Tables with several widths, and a linear layer."""

    def __init__(self, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, width) for width in widths)
        self.top = nn.Linear(sum(widths), 1)

    def forward(self, ids: Tensor) -> Tensor:
        columns = torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)
        return self.top(columns).square().mean()


def batch(rank: int) -> Tensor:
    return torch.randint(ROWS, (BATCH, len(WIDTHS)), generator=torch.Generator().manual_seed(rank))


def train(rank: int, world_size: int, kind: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = Recommender()
    optimizers = (kind(plain.tables.parameters(), lr=0.1), torch.optim.SGD(plain.top.parameters(), lr=0.1))
    model = embrace_fx.compile(plain, optimizer=optimizers, strategy={"tables.*": "alltoall"})
    ids = batch(rank)

    def step() -> None:
        model(ids).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    sent = bytes_per_step(step, sent_by_connection, model.synchronize)
    with model.record():
        for _ in range(3):
            step()
    timeline = model.timeline
    assert timeline is not None
    spans = [span for span in timeline.spans if span.operation.id == ROW_NORMS]
    return {
        "sent": sent,
        "predicted": model.plan.sent_bytes_per_step,
        "norms": [model.plan[f"tables.{k}.weight"].norm_bytes for k in range(len(WIDTHS))],
        "spans": sorted((span.rank, span.window) for span in spans),
        "waits": sum(wait.launch == str(ROW_NORMS) for wait in timeline.waits),
        "launch order": model.schedule.launch_order,
        "scheduled": [o.sent_bytes for o in model.schedule.steps.operations if o.id == ROW_NORMS],
    }


@pytest.mark.long
def test_squares_of_all_tables_rows_are_added_up_at_once() -> None:
    row_wise, by_elements = (run_ranks(2, train, kind) for kind in (embrace_fx.RowWiseAdagrad, torch.optim.Adagrad))
    first, plain = row_wise[0], by_elements[0]

    rows = [torch.cat([batch(0)[:, k], batch(1)[:, k]]).unique().numel() for k in range(len(WIDTHS))]
    assert first["norms"] == [4 * each for each in rows]  # 4 bytes per row; each of two ranks sends them once
    assert first["scheduled"] == [4 * sum(rows)]
    assert "row norms" in first["launch order"]
    windows = {window for _, window in first["spans"]}
    assert first["spans"] == [(rank, window) for rank in range(2) for window in sorted(windows)]  # one per step
    assert first["waits"] == len(first["spans"])
    assert plain["norms"] == [0, 0, 0]
    assert not plain["spans"]
    more = sum(each["sent"] - other["sent"] for each, other in zip(row_wise, by_elements, strict=True)) / 2
    assert more == pytest.approx(first["predicted"] - plain["predicted"], rel=2 * TOLERANCE)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_squares_have_a_place_in_every_schedule(schedule: ScheduleName) -> None:
    """On paper: after the gradients of all rows, before the updates that read them."""
    model = Recommender()
    optimizer = embrace_fx.RowWiseAdagrad(model.parameters(), lr=0.1)
    forecast = embrace_fx.plan(
        model, batch(0), world_size=2, optimizer=optimizer, strategy="alltoall", schedule=schedule
    )
    order = forecast.schedule.launch_order
    gradients = [k for k, name in enumerate(order) if any(part in name for part in ("gradients", "prior", "delayed"))]
    rows = [k for k, name in enumerate(order) if name.endswith("weight rows")]
    assert len(gradients) >= len(rows) == len(WIDTHS)
    assert max(gradients) < order.index(str(ROW_NORMS)) < min(rows)


def look_and_train(rank: int, world_size: int, looks: bool, schedule: ScheduleName) -> list[Tensor]:
    """Returns the tables after some steps, in each of which rank 0 alone may read a gradient."""
    torch.manual_seed(0)
    plain = Recommender((8, 12, 8)).double()  # the first and the last table are joined
    optimizer = embrace_fx.RowWiseAdagrad(plain.tables.parameters(), lr=0.1, initial_accumulator_value=0.1)
    rest = torch.optim.SGD(plain.top.parameters(), lr=0.1)
    how: dict[str, Any] = {"strategy": {"tables.*": "alltoall"}, "schedule": schedule}
    model = embrace_fx.compile(plain, optimizer=(optimizer, rest), **how)
    batches = [batch(10 * step + rank) for step in range(6)]
    for ids in model.lookahead(batches):
        model(ids).backward()
        if looks and rank == 0:
            gradient = plain.tables[0].weight.grad
            assert isinstance(gradient, TableShard)
            gradient.held.dense()
        for each in (optimizer, rest):
            each.step()
            each.zero_grad()
    assert [len(space.tables) for space in model.plan.spaces] == [2]
    with model.whole():
        return [parameter.detach().clone() for parameter in plain.parameters()]


@pytest.mark.parametrize(
    ("ranks", "looks", "schedule"),
    long_but(
        ("2-False-2d",), {f"{n}-{k}-{name}": (n, k, name) for n in (2, 3) for k in (False, True) for name in SCHEDULES}
    ),
)
def test_rows_are_those_of_one_process(ranks: int, looks: bool, schedule: ScheduleName) -> None:
    """A rank that has looked at one steps table by table, the others the space: squares are in one order."""
    torch.manual_seed(0)
    plain = Recommender((8, 12, 8)).double()  # the first and the last table are joined
    optimizer = embrace_fx.RowWiseAdagrad(plain.tables.parameters(), lr=0.1, initial_accumulator_value=0.1)
    rest = torch.optim.SGD(plain.top.parameters(), lr=0.1)
    for step in range(6):
        plain(torch.cat([batch(10 * step + rank) for rank in range(ranks)])).backward()
        for each in (optimizer, rest):
            each.step()
            each.zero_grad()
    for found in run_ranks(ranks, look_and_train, looks, schedule):
        for own, expected in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(own, expected.detach(), rtol=1e-9, atol=1e-12)
