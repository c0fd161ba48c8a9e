"""What a picture says besides its schedule: tables' places, DDP's step, other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import embrace_fx
from embrace_fx.cost.links import all_reduce, exchange
from embrace_fx.passes.scheduler.schedule_facts import ddp_exposed_ms, rescale_to_ranks
from embrace_fx.viz.page import GLOSSARY
from embrace_fx.viz.picture import Picture
from embrace_fx.what_if import Forecast


class Ratings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(20_000, 10)
        self.shops = nn.Embedding(5, 10)
        self.top = nn.Linear(10, 1)

    def forward(self, users: torch.Tensor, shops: torch.Tensor) -> torch.Tensor:
        return self.top(self.users(users) * self.shops(shops)).square().mean()


@pytest.fixture(scope="module")
def planned() -> Forecast:
    batch = (torch.arange(64), torch.arange(64) % 5)
    asked = {"users.weight": "alltoall", "shops.weight": "allreduce"}
    return embrace_fx.plan(Ratings(), batch, world_size=4, strategy=asked, cluster=embrace_fx.Cluster(1e4, 0.1))


def test_ddp_waits_for_the_tables_after_the_backward(planned: Forecast) -> None:
    exposed_ms = ddp_exposed_ms(planned, planned.schedule.steps, 4)
    tables_ms = all_reduce(4 * 200_050, 4).time_ms(planned.links, "all_reduce")
    assert exposed_ms == pytest.approx(tables_ms, rel=0.01)  # DDP hides nearly all of the two small gradients of `top`


def test_other_numbers_of_ranks(planned: Forecast) -> None:
    steps = planned.schedule.steps
    found = planned.schedule.background
    assert found is not None
    by_ranks = {each.ranks: each for each in found().steps}
    assert rescale_to_ranks(steps, planned, 4) == steps
    assert list(by_ranks) == [2, 4, 8, 64]
    assert by_ranks[4].step_ms == planned.schedule.diagnostics().step_ms
    assert by_ranks[2].step_ms < by_ranks[8].step_ms < by_ranks[64].step_ms
    assert by_ranks[2].ddp_exposed_ms < by_ranks[64].ddp_exposed_ms


def test_every_millisecond_of_a_step_has_a_name(planned: Forecast, tmp_path: Path) -> None:
    around = planned.schedule.background
    assert around is not None
    bars = Picture(planned.schedule, None, around()).bars()
    assert [bar.name for bar in bars] == ["predicted", "DDP, estimated"]
    for bar in bars:
        assert sum(part.value for part in bar.parts) == pytest.approx(bar.total_ms, rel=0.01)
        assert all(part.label.split()[0] in " ".join(GLOSSARY) for part in bar.parts)
    planned.schedule.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"columns 9 to 9"' in page
    assert all(term in page for term in GLOSSARY)


def test_a_collective_is_rescaled_by_the_bytes_that_each_rank_gives_to_it(planned: Forecast) -> None:
    own = max(planned.schedule.steps.communications, key=lambda each: each.sent_bytes * (each.kind == "gradients"))
    (on_8,) = (
        each for each in rescale_to_ranks(planned.schedule.steps, planned, 8).operations if each.name == own.name
    )
    on_4_ms, on_8_ms = (
        exchange("all_to_all", own.sent_bytes * 4 // 3, ranks).time_ms(planned.links.flattened(ranks), "all_to_all")
        for ranks in (4, 8)
    )
    assert on_8.duration_ms / own.duration_ms == pytest.approx(on_8_ms / on_4_ms, rel=1e-4)
