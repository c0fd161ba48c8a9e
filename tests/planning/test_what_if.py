"""Plans without ranks: against the plan that ranks make, the crossovers of the papers, and what cannot be asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import embrace_fx
from embrace_fx.cost.devices import DEVICES
from embrace_fx.cost.links import Cluster
from embrace_fx.planning import findings as planning
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.what_if import Forecast
from tests.support.ranks import run_ranks


class Words(nn.Module):
    """A large table of which few rows are read, under a small layer."""

    def __init__(self, rows: int = 20_000) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 64)
        self.mix = nn.Linear(64, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.mix(self.table(ids))).square().mean()


def batch(rank: int) -> Tensor:
    random = torch.Generator().manual_seed(rank)
    return (torch.rand(16, 20, generator=random) ** 4 * 20_000).long()


def made_by_ranks(
    rank: int, world_size: int, cluster: Cluster | None, rows: int = 20_000, schedule: Any = "none"
) -> Plan:
    torch.manual_seed(0)
    model = Words(rows)
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1), schedule=schedule, cluster=cluster)
    compiled(batch(rank) % rows).backward()
    return compiled.plan


SLOW = Cluster(1e6, 50.0)
"""So slow to start that one AllReduce of a whole table is sooner over than the three exchanges of a sharded one."""


@pytest.mark.parametrize(
    ("cluster", "links_are", "schedule"),
    [(SLOW, "given", "2d"), *(pytest.param(None, "probed", name, marks=pytest.mark.long) for name in ("none", "2d"))],
)
def test_it_is_the_plan_that_ranks_make(cluster: Cluster | None, links_are: str, schedule: Any) -> None:
    first, second = run_ranks(2, made_by_ranks, cluster, 20_000, schedule)
    model = Words()
    optimizer = SGD(model.parameters(), 0.1)
    expected = embrace_fx.plan(model, [batch(0), batch(1)], optimizer=optimizer, schedule=schedule, cluster=first.links)
    assert first == second
    assert first.decisions == expected.decisions
    assert first.buckets == expected.buckets
    assert f"links {links_are}: a rank " in first.explain()


def test_where_little_is_sent_no_link_is_probed() -> None:
    for plan in run_ranks(2, made_by_ranks, None, 50):
        assert plan.links == Cluster()
        assert "links assumed: " in plan.explain()


def probing_in_vain(rank: int, world_size: int) -> Plan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "measure_links", lambda *_: SLOW if rank == 0 else Cluster())
        return made_by_ranks(rank, world_size, None)


def test_ranks_choose_on_the_links_that_rank_0_probed() -> None:
    for plan in run_ranks(2, probing_in_vain):
        assert plan.links == SLOW
        assert plan["table.weight"].strategy == "allreduce"
    model = Words()
    on_the_default = embrace_fx.plan(model, [batch(0), batch(1)], optimizer=SGD(model.parameters(), 0.1))
    assert on_the_default["table.weight"].strategy == "alltoall"


def test_nothing_is_changed() -> None:
    model = Words()
    optimizer = Adam(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    embrace_fx.plan(model, {"ids": batch(0)}, world_size=4, optimizer=optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert type(optimizer) is Adam
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("batches", "world_size", "found"),
    [([batch(0), batch(1)], 1, r"2 batch\(es\) do not fit world_size=1"), ([], None, r"0 batch"), (batch(0), 0, "0")],
)
def test_ranks_that_make_no_sense_are_refused(batches: Any, world_size: int | None, found: str) -> None:
    with pytest.raises(ValueError, match=rf"plan\(\): .*{found}"):
        embrace_fx.plan(Words(), batches, world_size=world_size)


def test_a_compiled_model_has_a_plan_of_its_own() -> None:
    with pytest.raises(ValueError, match="compiled already"):
        embrace_fx.plan(embrace_fx.compile(Words()), batch(0))


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(16, marks=pytest.mark.long)])
def test_sharding_sends_the_density_of_all_reduce_and_two_nths_of_all_gather(ranks: int) -> None:
    """EmbRace, section 3: AlltoAll / AllReduce = density, AlltoAll / AllGather = 2/N; ids are extra."""
    model = Words()
    plan = embrace_fx.plan(model, [batch(0)] * ranks, optimizer=SGD(model.parameters(), 0.1))
    sent = {c.strategy: c.sent_bytes_per_step for c in plan["table.weight"].candidates}
    density = batch(0).unique().numel() / 20_000
    assert sent["alltoall"] / sent["allreduce"] == pytest.approx(density, rel=0.2)
    assert sent["alltoall"] / sent["allgather"] == pytest.approx(2 / ranks, rel=0.2)


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.users = nn.Embedding(300_000, 32), nn.Embedding(100_000, 32)
        self.top = nn.Linear(64, 1)

    def forward(self, words: Tensor, users: Tensor) -> Tensor:
        scores: Tensor = self.top(torch.cat([self.words(words), self.users(users)], -1))
        return scores.square().mean()


def test_a_plan_for_ranks_that_are_not_there_has_a_schedule_that_can_be_saved(tmp_path: Path) -> None:
    model = TwoTables()
    batch = (torch.arange(50), torch.arange(50))

    planned = embrace_fx.plan(
        model, batch, world_size=128, optimizer=SGD(model.parameters(), 0.1), cluster=Cluster(1e4, 0.001)
    )

    assert set(planned.sharded) == {"words.weight", "users.weight"}
    served = {name for operation in planned.schedule.steps.communications for name in operation.serves}
    assert served == {"words.weight and 1 more", "bucket 0"}
    assert planned.schedule.diagnostics().step_ms > 0
    for suffix in ("html", "json", "svg", "dot"):
        planned.schedule.save(tmp_path / f"schedule.{suffix}")
        assert (tmp_path / f"schedule.{suffix}").stat().st_size > 1000
    planned.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == planned
    assert model.words.weight.shape == (300_000, 32)


class Large(nn.Module):
    """A table of 1 TB, 3 TB with AdamW's state."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(2_000_000_000, 128, mode="sum", device="meta")
        self.mix = nn.Linear(128, 1024, device="meta")

    def forward(self, ids: Tensor) -> Tensor:
        return self.mix(self.table(ids)).square().mean()


def on_paper(memory: float, host_bytes: float = 200e9) -> Forecast:
    """Returns the plan for eight H100 GPUs of one machine."""
    h100, random = DEVICES["H100"], torch.Generator().manual_seed(0)
    model, ids = Large(), (2e9 ** torch.rand(512, 16, generator=random) - 1).long()
    return embrace_fx.plan(
        model,
        ids,
        world_size=8,
        cluster=h100.cluster(50e6, devices_per_machine=8),
        optimizer=Adam(model.parameters()),
        strategy={"table.weight": "alltoall"},
        table_memory=memory,
        storage=h100.storage(host_bytes),
    )


def test_budgets_of_a_table_beyond_memory_on_paper() -> None:
    little, much = on_paper(20e9), on_paper(60e9)
    of, more = little.memory["table.weight"], much.memory["table.weight"]
    assert of.record_bytes == 3 * 16 * 4 + 3 * 8  # 3 tensors with 16 columns; checksum, row, step count
    assert 0.98 * 20e9 < of.nbytes <= 20e9 < more.nbytes <= 60e9
    (host, from_host), (drive, from_drive) = of.moved_by_tier
    assert (host.name, drive.name) == ("host memory", "NVMe drive")
    assert more.moved_rows < from_host
    assert from_drive < from_host < of.draws.rows
    step_ms, faster_ms = (each.schedule.diagnostics().step_ms for each in (little, much))
    assert faster_ms <= step_ms
    assert step_ms == pytest.approx(of.read_ms + of.write_ms)  # the step is limited by the drive
    beside_ms = little.schedule.without_storage_ms
    at_speed = on_paper(of.for_step(beside_ms).nbytes)
    assert at_speed.schedule.diagnostics().exposed_ms["storage"] <= 0.02 * beside_ms
    told = little.explain()
    assert re.search(
        r"table.weight, 18.6 GiB of memory: .* from host memory, which holds .* from NVMe drive;\n"
        r" *least budget",
        told,
    )
    with pytest.raises(ValueError, match=r"too few for table.weight. The table needs at least 8,[0-9,]+ bytes"):
        on_paper(8e9 + 1e5)
